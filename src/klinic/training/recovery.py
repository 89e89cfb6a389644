"""Executes recovery decisions. Write-ahead: the plan is saved before it is executed.

`recovery.json` in the run folder holds the plan, so a run killed in between resumes it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from klinic.doctor.anomalies import Anomaly, AnomalyLimits, History, is_healthy
from klinic.doctor.recovery import Decision, LRBackoff, RecoveryPlan, decide_recovery, was_retry
from klinic.errors import CheckpointError, EvidenceError
from klinic.evidence.files import json_bytes, read_json
from klinic.evidence.run_facts import RECOVERY
from klinic.evidence.writing import write_atomically
from klinic.recipe.sections import RecoverySection
from klinic.training import checkpoint
from klinic.training.guards import StepAnomalyError

ANOMALY_EVENT = "trouble"  # the event
TRANSIENT_EVENT = "transient"
DECISION_EVENTS = frozenset({ANOMALY_EVENT, TRANSIENT_EVENT})
TRANSIENT_MESSAGE = "Retry succeeded: the anomaly was transient."
EVENT_KEY = "event"  # a key of recovery.json, in addition to those of the plan


def anomaly_limits(section: RecoverySection) -> AnomalyLimits:
    """Return the anomaly limits of a recipe."""
    return AnomalyLimits(
        kl=section.kl_limit,
        update_kl=section.update_kl_limit,
        grad_norm=section.grad_norm_limit,
        reward_drop=section.reward_drop,
    )


def lr_backoff(section: RecoverySection) -> LRBackoff:
    """Return the learning-rate back-off and the number of anomalies that stops a run."""
    return LRBackoff(
        lr_factor=section.lr_factor,
        lr_steps=section.lr_steps,
        max_consecutive=section.max_consecutive,
    )


class RecoveryManager:
    """The recovery plan of a run, and the decisions that extend it."""

    def __init__(self, folder: Path, section: RecoverySection | None) -> None:
        self._folder = folder
        self._section = section
        path = folder / RECOVERY
        self.event: dict[str, Any] | None = None
        """The last decision as events.jsonl holds it: saved with the plan, so that a kill between
        the two writes does not lose it.
        """
        self.plan = RecoveryPlan()
        if path.exists():
            self.plan, self.event = _read_plan(path)

    @property
    def limits(self) -> AnomalyLimits | None:
        """The anomaly limits; None if recovery is disabled."""
        return None if self._section is None else anomaly_limits(self._section)

    def decide(self, step_anomaly: StepAnomalyError, history: History, *, step: int) -> Decision:
        """Decide how to handle an anomaly, and save the decision before it is executed."""
        anomaly, batch_indices = step_anomaly.anomaly, step_anomaly.batch_indices
        assert self._section is not None  # noqa: S101 - else no anomaly is raised
        backoff = lr_backoff(self._section)
        target = self._rollback_target(anomaly, history, step)
        decision = decide_recovery(
            backoff, self.plan, anomaly, step=step, batch_indices=batch_indices, checkpoint=target
        )
        self._save_plan(decision.plan, anomaly_event(step, decision, step_anomaly))
        return decision

    def confirm_transient(self, step: int, batch_indices: Sequence[int]) -> bool:
        """Whether a successful step is a retry, which makes its anomaly transient; true once."""
        if not was_retry(self.plan, step=step, batch_indices=batch_indices):
            return False
        self._save_plan(
            self.plan.without_retry(),
            {"step": step, "event": TRANSIENT_EVENT, "says": TRANSIENT_MESSAGE},
        )
        return True

    def finish_rollback(self) -> None:
        """Save that a rollback is complete."""
        if self.plan.back_to is not None:
            self._save_plan(self.plan.without_rollback())

    def _rollback_target(self, anomaly: Anomaly, history: History, step: int) -> int:
        """Choose a checkpoint: the newest, or an older one if that is too late or did not help."""
        steps = checkpoint.checkpoint_steps(self._folder)
        if not anomaly.may_be_transient:  # a slow anomaly: the newest may be affected already
            steps = self._healthy_checkpoints(history) or steps[:1]
        stuck = anomaly.damaged and step <= self.plan.last_step
        older = max(0, self.plan.consecutive - anomaly.may_be_transient) if stuck else 0
        return steps[max(0, len(steps) - 1 - older)]

    def protected_checkpoint(self, history: History) -> int | None:
        """Return the newest healthy checkpoint, which must not be pruned."""
        limits = self.limits
        if limits is None or (limits.kl is None and limits.reward_drop is None):
            return None
        return max(self._healthy_checkpoints(history), default=None)

    def _healthy_checkpoints(self, history: History) -> list[int]:
        """Return the steps whose checkpoints have a healthy history."""
        limits = self.limits
        assert limits is not None  # noqa: S101 - else no anomaly is raised
        healthy_steps = []
        for step in checkpoint.checkpoint_steps(self._folder):
            try:
                saved_history = History.from_json(
                    checkpoint.read_state(self._folder, step)["history"]
                )
            except (CheckpointError, KeyError):  # broken, or of an earlier version
                continue
            if is_healthy(limits, saved_history, best_reward=history.best_reward):
                healthy_steps.append(step)
        return healthy_steps

    def _save_plan(self, plan: RecoveryPlan, event: dict[str, Any] | None = None) -> None:
        if plan == self.plan and event is None:
            return
        self.plan, self.event = plan, event or self.event
        values = json_bytes({**plan.to_json(), EVENT_KEY: self.event})
        write_atomically(self._folder / RECOVERY, values + b"\n")


def _read_plan(path: Path) -> tuple[RecoveryPlan, dict[str, Any] | None]:
    try:
        values = read_json(path)
        # earlier versions wrote no event
        return RecoveryPlan.from_json(values), values.get(EVENT_KEY)
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(
            f"{path} is damaged: {type(error).__name__} {error}. It lists the skipped batches; "
            "restore it from a copy, or delete it to try those batches again."
        ) from error


def anomaly_event(step: int, decision: Decision, step_anomaly: StepAnomalyError) -> dict[str, Any]:
    """Return the event of an anomaly: kind, measurement, batches, metrics and action."""
    anomaly = step_anomaly.anomaly
    return {
        "step": step,
        "event": ANOMALY_EVENT,
        "says": decision.says,
        "act": decision.act,
        "kind": anomaly.kind,
        "site": anomaly.site,
        "measured": anomaly.measured,
        "limit": anomaly.limit,
        "places": list(step_anomaly.batch_indices),
        "metrics": step_anomaly.metrics,
    }
