"""Recovery in a TRL run: skips an update, cuts the learning rate or stops the run.

`doctor.recovery` decides. TRL's loop can neither retry a step nor roll back to a checkpoint, so
each batch is tried once. Where klinic's own loop would roll back, the next batch runs at a lower
rate; the run stops if the weights are non-finite or the KL exceeds its limit. Steps count applied
updates only.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from klinic.checks.base import count_updates
from klinic.doctor.anomalies import (
    Anomaly,
    History,
    check_batch_reward,
    check_grad_norm,
    check_history,
    non_finite,
    with_grad_norm,
    with_kl,
    with_reward,
)
from klinic.doctor.recovery import Decision, RecoveryPlan, decide_recovery
from klinic.errors import ConfigError
from klinic.evidence.metrics import mean_k1
from klinic.evidence.record import StepRecord
from klinic.learner.step_results import finite_at
from klinic.recipe.sections import RecoverySection
from klinic.training.recovery import anomaly_limits, lr_backoff


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateDecision:
    """The decision about a pending update."""

    lr_factor: float = 1.0
    skip: bool = False
    stop: bool = False
    message: str = ""


class TRLRecovery:
    """The limits, the history and the recovery plan of a run."""

    def __init__(self, section: RecoverySection) -> None:
        if section.update_kl_limit is not None:
            raise ConfigError(
                "Recovery(update_kl_limit) ends the updates of a batch early, which TRL does not "
                "support. Remove it; kl_limit and grad_norm_limit work."
            )
        self._limits = anomaly_limits(section)
        self._backoff = lr_backoff(section)
        self._history = History()
        self._plan = RecoveryPlan()
        self._num_updates = 0

    def judge_update(self, record: StepRecord, *, weights_finite: bool) -> UpdateDecision:
        """Decide whether to apply a pending update; `record` holds its batches."""
        anomaly = self._find_anomaly(record, weights_finite=weights_finite)
        step = self._num_updates + 1
        if anomaly is None:
            self._num_updates = step
            return UpdateDecision(lr_factor=self._plan.lr_factor(step))
        batch_index = record.step
        plan = replace(self._plan, tried=(step, batch_index))  # there is no retry
        decision = decide_recovery(
            self._backoff,
            plan,
            anomaly,
            step=step,
            batch_indices=(batch_index,),
            checkpoint=self._num_updates,
        )
        self._plan = replace(decision.plan, back_to=None)
        return _to_update_decision(decision, anomaly)

    def _find_anomaly(self, record: StepRecord, *, weights_finite: bool) -> Anomaly | None:
        loss, norm = (float(record.facts.get(name) or 0.0) for name in ("loss", "grad_norm"))
        sites = {"weights": weights_finite, **finite_at(record, loss=loss, grad_norm=norm)}
        anomaly = non_finite(sites)
        reward = None if record.reward is None else float(np.nanmean(record.reward))
        anomaly = anomaly or check_grad_norm(self._limits, self._history, norm)
        anomaly = anomaly or check_batch_reward(self._limits, self._history, reward)
        if anomaly is not None:
            return anomaly
        self._history = with_reward(self._history, record.step, reward)
        self._history = with_kl(self._history, mean_k1(record))
        if (policy_anomaly := check_history(self._limits, self._history)) is not None:
            return policy_anomaly
        self._history = with_grad_norm(self._history, norm)
        return None


def _to_update_decision(decision: Decision, anomaly: Anomaly) -> UpdateDecision:
    if decision.act == "go on":
        return UpdateDecision()
    if anomaly.damaged or decision.act == "stop":
        reason = "no earlier weights to roll back to" if anomaly.damaged else "too many in a row"
        return UpdateDecision(stop=True, skip=True, message=f"{anomaly}. Stopped: {reason}.")
    cut = decision.plan.cuts[-1]
    rate = (
        f"learning rate x {decision.plan.lr_factor(cut.first):g} "
        f"for {count_updates(cut.last - cut.first + 1)}"
    )
    return UpdateDecision(skip=True, message=f"{anomaly}. The update was skipped; {rate}.")


def drop_gradients(optimizer: Any) -> None:
    """Make the next optimizer step a no-op for weights and moments."""
    optimizer.zero_grad(set_to_none=True)
