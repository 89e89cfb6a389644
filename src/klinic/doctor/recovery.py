"""Decides on the recovery from an anomaly; the training loop executes the decision.

    1  again      drop the step and retry it once: if the retry succeeds, the anomaly was transient
    2  skip       the retry failed: skip the batch, cut the learning rate for some steps, and run
                  the step on the next batch
    3  roll back  the second batch in a row, or damaged weights: restore a checkpoint and continue
                  without the batch, at the lower rate
    4  stop       too many anomalies in a row

The plan holds all decisions: the skipped batches and the steps with a lower learning rate. A run is
a function of recipe, seed and plan, so a run that is killed during a rollback and resumed reaches
the same weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from klinic.doctor.anomalies import Anomaly

MAX_CUT_FACTOR = 16  # times `lr_steps`: the maximum length of a cut, which doubles each time
MAX_ACTIVE_CUTS = 2  # cuts that count at once: below the second, nothing would be learnt any more
RETRY_FACTOR = 2  # times `max_consecutive`: retries without a new furthest step

RecoveryAction = Literal["again", "replay", "go on", "skip", "roll back", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LRBackoff:
    """Learning-rate back-off and the limit on consecutive anomalies, from the recipe."""

    lr_factor: float = 0.1
    lr_steps: int = 50
    max_consecutive: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LRCut:
    """A range of steps, inclusive, whose learning rate is multiplied by `factor`."""

    first: int
    last: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """All recovery decisions so far; JSON values that round-trip exactly."""

    skipped: tuple[int, ...] = ()
    """Indices of the skipped batches."""
    cuts: tuple[LRCut, ...] = ()
    num_cuts: int = 0
    """Number of cuts so far, including those that a rollback removed."""
    known: tuple[str, ...] = ()
    """Sites of mild persistent anomalies, which are not retried."""
    tried: tuple[int, int] | None = None
    """The last retried step, and the index of its first batch."""
    front: int = 0
    tries: int = 0
    """Retries since the furthest retried step, `front`, last advanced."""
    last_step: int = 0
    consecutive: int = 0
    """Failed batches since a step after `last_step` succeeded."""
    back_to: int | None = None
    """Checkpoint step of a pending rollback, else None."""

    def lr_factor(self, step: int) -> float:
        """Return the learning-rate factor of a step.

        >>> RecoveryPlan(cuts=(LRCut(first=3, last=4, factor=0.1),)).lr_factor(4)
        0.1
        """
        active = sorted(cut.factor for cut in self.cuts if cut.first <= step <= cut.last)
        return math.prod(active[:MAX_ACTIVE_CUTS], start=1.0)

    def next_batch_index(self, batch_index: int) -> int:
        """Return the index of the next batch that is not skipped.

        >>> RecoveryPlan(skipped=(4, 5)).next_batch_index(3)
        6
        """
        batch_index += 1
        while batch_index in self.skipped:
            batch_index += 1
        return batch_index

    def without_retry(self) -> "RecoveryPlan":
        """Return the plan after a successful retry."""
        return replace(self, tried=None)

    def without_rollback(self) -> "RecoveryPlan":
        """Return the plan after a completed rollback."""
        return replace(self, back_to=None)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RecoveryPlan":
        """Return the plan from the result of `to_json`; other keys are ignored."""
        own = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        lists = {name: tuple(values[name]) for name in ("skipped", "known")}
        tried = None if values["tried"] is None else tuple(values["tried"])
        cuts = tuple(LRCut(**cut) for cut in values["cuts"])
        return cls(**{**own, **lists, "tried": tried, "cuts": cuts})


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A recovery action, the plan after it, and a message for people."""

    act: RecoveryAction
    plan: RecoveryPlan
    says: str


def decide_recovery(
    backoff: LRBackoff,
    plan: RecoveryPlan,
    anomaly: Anomaly,
    *,
    step: int,
    batch_indices: Sequence[int],
    checkpoint: int,
) -> Decision:
    """Return the recovery from an anomaly of a step with these batch indices.

    `checkpoint` is the step of the checkpoint that a rollback restores.
    """
    here = (step, batch_indices[0])
    if anomaly.is_mild and anomaly.site in plan.known:
        return Decision(act="go on", plan=plan, says="")
    if anomaly.may_be_transient and plan.tried != here:
        plan = _count_retry(plan, here)
        if plan.tries <= RETRY_FACTOR * backoff.max_consecutive:
            return _retry_decision(plan, anomaly, checkpoint)
        return Decision(
            act="stop", plan=plan, says=_retries_exhausted_message(anomaly, plan, checkpoint)
        )
    if anomaly.is_mild:
        plan = replace(plan, known=(*plan.known, str(anomaly.site)), tried=None)
        says = f"{anomaly}, also on retry: persistent. Such rows are skipped from now on."
        return Decision(act="go on", plan=plan, says=says)
    return _decide_persistent(
        backoff, plan, anomaly, step=step, batch_indices=batch_indices, checkpoint=checkpoint
    )


def _decide_persistent(
    backoff: LRBackoff,
    plan: RecoveryPlan,
    anomaly: Anomaly,
    *,
    step: int,
    batch_indices: Sequence[int],
    checkpoint: int,
) -> Decision:
    """Return the recovery from an anomaly that a retry does not fix."""
    consecutive = plan.consecutive + 1 if step <= plan.last_step else 1
    plan = replace(plan, last_step=max(step, plan.last_step), consecutive=consecutive)
    if consecutive >= backoff.max_consecutive:
        return Decision(act="stop", plan=plan, says=_stop_message(anomaly, plan, checkpoint))
    if anomaly.blames_batch:
        plan = replace(plan, skipped=(*plan.skipped, *batch_indices))
    if not anomaly.damaged and consecutive == 1:
        plan = _add_lr_cut(backoff, plan, first=step)
        says = (
            f"{anomaly}, also on retry: persistent. "
            f"{_describe_remedy(plan, anomaly, batch_indices)}."
        )
        return Decision(act="skip", plan=plan, says=says)
    plan = _add_lr_cut(backoff, replace(plan, back_to=checkpoint), first=checkpoint + 1)
    again = ", also on retry: persistent" if anomaly.may_be_transient else ""
    says = (
        f"{anomaly}{again}. Rolling back to the checkpoint of step {checkpoint}: "
        f"{_describe_remedy(plan, anomaly, batch_indices)}."
    )
    return Decision(act="roll back", plan=plan, says=says)


def was_retry(plan: RecoveryPlan, *, step: int, batch_indices: Sequence[int]) -> bool:
    """Whether a successful step was a retry."""
    return plan.tried == (step, batch_indices[0])


def _count_retry(plan: RecoveryPlan, here: tuple[int, int]) -> RecoveryPlan:
    """Count a retry; a new furthest step resets the count."""
    further = here[0] > plan.front
    tries = 1 if further else plan.tries + 1
    return replace(plan, tried=here, front=max(here[0], plan.front), tries=tries)


def _retry_decision(plan: RecoveryPlan, anomaly: Anomaly, checkpoint: int) -> Decision:
    if not anomaly.damaged:
        says = f"{anomaly}. Nothing was committed; retrying the step."
        return Decision(act="again", plan=plan, says=says)
    says = f"{anomaly}. Rolling back to the checkpoint of step {checkpoint} to retry."
    return Decision(act="replay", plan=replace(plan, back_to=checkpoint), says=says)


def _add_lr_cut(backoff: LRBackoff, plan: RecoveryPlan, *, first: int) -> RecoveryPlan:
    """Cut the learning rate from a step on, for twice as many steps as the last cut."""
    times = min(2**plan.num_cuts, MAX_CUT_FACTOR)
    last = first + times * backoff.lr_steps - 1
    cut = LRCut(first=first, last=last, factor=backoff.lr_factor)
    earlier = tuple(c for c in plan.cuts if c.first < first or plan.back_to is None)
    return replace(plan, cuts=(*earlier, cut), num_cuts=plan.num_cuts + 1)


def _describe_remedy(plan: RecoveryPlan, anomaly: Anomaly, batch_indices: Sequence[int]) -> str:
    cut = plan.cuts[-1]
    factor = plan.lr_factor(cut.first)
    rate = f"learning rate x {factor:g} for steps {cut.first} to {cut.last}"
    if not anomaly.blames_batch:
        return rate
    named = ", ".join(map(str, batch_indices))
    return f"batch{'es' if len(batch_indices) > 1 else ''} {named} skipped, {rate}"


def _stop_message(anomaly: Anomaly, plan: RecoveryPlan, checkpoint: int) -> str:
    return (
        f"{anomaly}: failed batch {plan.consecutive} in a row without a step after step "
        f"{plan.last_step}. {_final_state_message(anomaly, checkpoint)}"
    )


def _retries_exhausted_message(anomaly: Anomaly, plan: RecoveryPlan, checkpoint: int) -> str:
    return (
        f"{anomaly}, after {plan.tries - 1} retries without a step after step "
        f"{plan.front}. {_final_state_message(anomaly, checkpoint)} "
        "Anomalies at changing steps often come "
        "from hardware."
    )


def _final_state_message(anomaly: Anomaly, checkpoint: int) -> str:
    if anomaly.damaged:
        return f"Stopped; the checkpoint of step {checkpoint} is the last healthy one."
    return "Stopped and saved; the step was not committed."
