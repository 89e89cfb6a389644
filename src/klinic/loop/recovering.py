"""Executes recovery decisions. Write-ahead: the plan is saved before it is executed.

`recovery.json` in the run folder holds the plan, so a run killed in between resumes it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from klinic.doctor.recovery import Brakes, Decision, Plan, decide, passed
from klinic.doctor.trouble import History, Limits, Trouble, is_well
from klinic.errors import CheckpointError, EvidenceError
from klinic.evidence.files import json_bytes, read_json
from klinic.evidence.run_facts import RECOVERY
from klinic.evidence.writing import write_atomically
from klinic.loop import checkpoint
from klinic.loop.watch import InTroubleError
from klinic.recipe.recovery import RecoverySection

TROUBLE = "trouble"  # the event
TRANSIENT = "transient"
DECISIONS = frozenset({TROUBLE, TRANSIENT})
PASSED = "Retry succeeded: the anomaly was transient."
EVENT = "event"  # a key of recovery.json, in addition to those of the plan


def limits_of(section: RecoverySection) -> Limits:
    """Return the anomaly limits of a recipe."""
    return Limits(
        kl=section.kl_limit,
        update_kl=section.update_kl_limit,
        grad_norm=section.grad_norm_limit,
        reward_drop=section.reward_drop,
    )


def brakes_of(section: RecoverySection) -> Brakes:
    """Return the learning-rate back-off and the number of anomalies that stops a run."""
    return Brakes(
        lr_factor=section.lr_factor,
        lr_steps=section.lr_steps,
        max_consecutive=section.max_consecutive,
    )


class Recovering:
    """The recovery plan of a run, and the decisions that extend it."""

    def __init__(self, folder: Path, section: RecoverySection | None) -> None:
        self._folder = folder
        self._section = section
        path = folder / RECOVERY
        self.event: dict[str, Any] | None = None
        """The last decision as events.jsonl holds it: saved with the plan, so that a kill between
        the two writes does not lose it.
        """
        self.plan = Plan()
        if path.exists():
            self.plan, self.event = _read(path)

    @property
    def limits(self) -> Limits | None:
        """The anomaly limits; None if recovery is disabled."""
        return None if self._section is None else limits_of(self._section)

    def decide(self, found: InTroubleError, history: History, *, step: int) -> Decision:
        """Decide how to handle an anomaly, and save the decision before it is executed."""
        trouble, places = found.trouble, found.places
        assert self._section is not None  # noqa: S101 - else no anomaly is raised
        brakes = brakes_of(self._section)
        target = self._target(trouble, history, step)
        decision = decide(brakes, self.plan, trouble, step=step, places=places, checkpoint=target)
        self._keep(decision.plan, trouble_event(step, decision, found))
        return decision

    def has_passed(self, step: int, places: Sequence[int]) -> bool:
        """Whether a successful step is a retry, which makes its anomaly transient; true once."""
        if not passed(self.plan, step=step, places=places):
            return False
        self._keep(self.plan.without_try(), {"step": step, "event": TRANSIENT, "says": PASSED})
        return True

    def arrived(self) -> None:
        """Save that a rollback is complete."""
        if self.plan.back_to is not None:
            self._keep(self.plan.without_rollback())

    def _target(self, trouble: Trouble, history: History, step: int) -> int:
        """Choose a checkpoint: the newest, or an older one if that is too late or did not help."""
        steps = checkpoint.steps(self._folder)
        if not trouble.may_pass:  # a slow anomaly: the newest may be affected already
            steps = self._well(history) or steps[:1]
        stuck = trouble.damaged and step <= self.plan.last_step
        older = max(0, self.plan.consecutive - trouble.may_pass) if stuck else 0
        return steps[max(0, len(steps) - 1 - older)]

    def spare(self, history: History) -> int | None:
        """Return the newest healthy checkpoint, which must not be pruned."""
        limits = self.limits
        if limits is None or (limits.kl is None and limits.reward_drop is None):
            return None
        return max(self._well(history), default=None)

    def _well(self, history: History) -> list[int]:
        """Return the steps whose checkpoints have a healthy history."""
        limits = self.limits
        assert limits is not None  # noqa: S101 - else no anomaly is raised
        found = []
        for step in checkpoint.steps(self._folder):
            try:
                before = History.from_json(checkpoint.state_of(self._folder, step)["history"])
            except (CheckpointError, KeyError):  # broken, or of an earlier version
                continue
            if is_well(limits, before, best_reward=history.best_reward):
                found.append(step)
        return found

    def _keep(self, plan: Plan, event: dict[str, Any] | None = None) -> None:
        if plan == self.plan and event is None:
            return
        self.plan, self.event = plan, event or self.event
        values = json_bytes({**plan.to_json(), EVENT: self.event})
        write_atomically(self._folder / RECOVERY, values + b"\n")


def _read(path: Path) -> tuple[Plan, dict[str, Any] | None]:
    try:
        values = read_json(path)
        return Plan.from_json(values), values.get(EVENT)  # earlier versions wrote no event
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(
            f"{path} is damaged: {type(error).__name__} {error}. It lists the skipped batches; "
            "restore it from a copy, or delete it to try those batches again."
        ) from error


def trouble_event(step: int, decision: Decision, found: InTroubleError) -> dict[str, Any]:
    """Return the event of an anomaly: kind, measurement, batches, metrics and action."""
    trouble = found.trouble
    return {
        "step": step,
        "event": TROUBLE,
        "says": decision.says,
        "act": decision.act,
        "kind": trouble.kind,
        "site": trouble.site,
        "measured": trouble.measured,
        "limit": trouble.limit,
        "places": list(found.places),
        "metrics": found.metrics,
    }
