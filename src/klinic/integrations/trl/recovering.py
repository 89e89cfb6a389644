"""Recovery in a TRL run: skips an update, cuts the learning rate or stops the run.

`doctor.recovery` decides. TRL's loop can neither retry a step nor roll back to a checkpoint, so
each batch is tried once. Where klinic's own loop would roll back, the next batch runs at a lower
rate; the run stops if the weights are non-finite or the KL exceeds its limit. Steps count applied
updates only.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from klinic.doctor.recovery import Decision, Plan, decide
from klinic.doctor.trouble import (
    History,
    Trouble,
    not_a_number,
    of_batch,
    of_gradient,
    of_policy,
    with_grad_norm,
    with_kl,
    with_reward,
)
from klinic.errors import ConfigError
from klinic.evidence.metrics import mean_k1
from klinic.evidence.record import StepRecord
from klinic.learner.findings import finite_at
from klinic.loop.recovering import brakes_of, limits_of
from klinic.recipe.recovery import RecoverySection


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision about a pending update."""

    lr_factor: float = 1.0
    skip: bool = False
    stop: bool = False
    says: str = ""


class Recovering:
    """The limits, the history and the recovery plan of a run."""

    def __init__(self, section: RecoverySection) -> None:
        if section.update_kl_limit is not None:
            raise ConfigError(
                "Recovery(update_kl_limit) ends the updates of a batch early, which TRL does not "
                "support. Remove it; kl_limit and grad_norm_limit work."
            )
        self._limits = limits_of(section)
        self._brakes = brakes_of(section)
        self._history = History()
        self._plan = Plan()
        self._made = 0

    def judge(self, record: StepRecord, *, weights_sound: bool) -> Verdict:
        """Decide whether to apply a pending update; `record` holds its batches."""
        trouble = self._trouble(record, weights_sound=weights_sound)
        step = self._made + 1
        if trouble is None:
            self._made = step
            return Verdict(lr_factor=self._plan.lr_factor(step))
        place = record.step
        tried = replace(self._plan, tried=(step, place))  # there is no retry
        made = decide(
            self._brakes, tried, trouble, step=step, places=(place,), checkpoint=self._made
        )
        self._plan = replace(made.plan, back_to=None)
        return _verdict(made, trouble)

    def _trouble(self, record: StepRecord, *, weights_sound: bool) -> Trouble | None:
        loss, norm = (float(record.facts.get(name) or 0.0) for name in ("loss", "grad_norm"))
        sites = {"weights": weights_sound, **finite_at(record, loss=loss, grad_norm=norm)}
        found = not_a_number(sites)
        reward = None if record.reward is None else float(np.nanmean(record.reward))
        found = found or of_gradient(self._limits, self._history, norm)
        found = found or of_batch(self._limits, self._history, reward)
        if found is not None:
            return found
        self._history = with_reward(self._history, record.step, reward)
        self._history = with_kl(self._history, mean_k1(record))
        if (beyond := of_policy(self._limits, self._history)) is not None:
            return beyond
        self._history = with_grad_norm(self._history, norm)
        return None


def _verdict(made: Decision, trouble: Trouble) -> Verdict:
    if made.act == "go on":
        return Verdict()
    if trouble.damaged or made.act == "stop":
        why = "no earlier weights to roll back to" if trouble.damaged else "too many in a row"
        return Verdict(stop=True, skip=True, says=f"{trouble}. Stopped: {why}.")
    cut = made.plan.cuts[-1]
    rate = (
        f"learning rate x {made.plan.lr_factor(cut.first):g} for {cut.last - cut.first + 1} updates"
    )
    return Verdict(skip=True, says=f"{trouble}. The update was skipped; {rate}.")


def drop_gradients(optimizer: Any) -> None:
    """Make the next optimizer step a no-op for weights and moments."""
    optimizer.zero_grad(set_to_none=True)
