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

from klinic.doctor.trouble import Trouble

LONGEST_CUT = 16  # times `lr_steps`: the maximum length of a cut, which doubles each time
DEEPEST = 2  # cuts that count at once: below the second, nothing would be learnt any more
TRIES = 2  # times `max_consecutive`: retries without a new furthest step

Act = Literal["again", "replay", "go on", "skip", "roll back", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Brakes:
    """Learning-rate back-off and the limit on consecutive anomalies, from the recipe."""

    lr_factor: float = 0.1
    lr_steps: int = 50
    max_consecutive: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A range of steps, inclusive, whose learning rate is multiplied by `factor`."""

    first: int
    last: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All recovery decisions so far; JSON values that round-trip exactly."""

    skipped: tuple[int, ...] = ()
    """Indices of the skipped batches."""
    cuts: tuple[Cut, ...] = ()
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

        >>> Plan(cuts=(Cut(first=3, last=4, factor=0.1),)).lr_factor(4)
        0.1
        """
        active = sorted(cut.factor for cut in self.cuts if cut.first <= step <= cut.last)
        return math.prod(active[:DEEPEST], start=1.0)

    def next_place(self, place: int) -> int:
        """Return the index of the next batch that is not skipped.

        >>> Plan(skipped=(4, 5)).next_place(3)
        6
        """
        place += 1
        while place in self.skipped:
            place += 1
        return place

    def without_try(self) -> "Plan":
        """Return the plan after a successful retry."""
        return replace(self, tried=None)

    def without_rollback(self) -> "Plan":
        """Return the plan after a completed rollback."""
        return replace(self, back_to=None)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Plan":
        """Return the plan from the result of `to_json`; other keys are ignored."""
        own = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        lists = {name: tuple(values[name]) for name in ("skipped", "known")}
        tried = None if values["tried"] is None else tuple(values["tried"])
        cuts = tuple(Cut(**cut) for cut in values["cuts"])
        return cls(**{**own, **lists, "tried": tried, "cuts": cuts})


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A recovery action, the plan after it, and a message for people."""

    act: Act
    plan: Plan
    says: str


def decide(
    brakes: Brakes,
    plan: Plan,
    trouble: Trouble,
    *,
    step: int,
    places: Sequence[int],
    checkpoint: int,
) -> Decision:
    """Return the recovery from an anomaly of a step with these batch indices.

    `checkpoint` is the step of the checkpoint that a rollback restores.
    """
    here = (step, places[0])
    if trouble.is_mild and trouble.site in plan.known:
        return Decision(act="go on", plan=plan, says="")
    if trouble.may_pass and plan.tried != here:
        plan = _tried(plan, here)
        if plan.tries <= TRIES * brakes.max_consecutive:
            return _again(plan, trouble, checkpoint)
        return Decision(act="stop", plan=plan, says=_tired(trouble, plan, checkpoint))
    if trouble.is_mild:
        plan = replace(plan, known=(*plan.known, str(trouble.site)), tried=None)
        says = f"{trouble}, also on retry: persistent. Such rows are skipped from now on."
        return Decision(act="go on", plan=plan, says=says)
    return _persistent(brakes, plan, trouble, step=step, places=places, checkpoint=checkpoint)


def _persistent(
    brakes: Brakes,
    plan: Plan,
    trouble: Trouble,
    *,
    step: int,
    places: Sequence[int],
    checkpoint: int,
) -> Decision:
    """Return the recovery from an anomaly that a retry does not fix."""
    consecutive = plan.consecutive + 1 if step <= plan.last_step else 1
    plan = replace(plan, last_step=max(step, plan.last_step), consecutive=consecutive)
    if consecutive >= brakes.max_consecutive:
        return Decision(act="stop", plan=plan, says=_stopped(trouble, plan, checkpoint))
    if trouble.blames_batch:
        plan = replace(plan, skipped=(*plan.skipped, *places))
    if not trouble.damaged and consecutive == 1:
        plan = _cut(brakes, plan, first=step)
        says = f"{trouble}, also on retry: persistent. {_remedy(plan, trouble, places)}."
        return Decision(act="skip", plan=plan, says=says)
    plan = _cut(brakes, replace(plan, back_to=checkpoint), first=checkpoint + 1)
    again = ", also on retry: persistent" if trouble.may_pass else ""
    says = (
        f"{trouble}{again}. Rolling back to the checkpoint of step {checkpoint}: "
        f"{_remedy(plan, trouble, places)}."
    )
    return Decision(act="roll back", plan=plan, says=says)


def passed(plan: Plan, *, step: int, places: Sequence[int]) -> bool:
    """Whether a successful step was a retry."""
    return plan.tried == (step, places[0])


def _tried(plan: Plan, here: tuple[int, int]) -> Plan:
    """Count a retry; a new furthest step resets the count."""
    further = here[0] > plan.front
    tries = 1 if further else plan.tries + 1
    return replace(plan, tried=here, front=max(here[0], plan.front), tries=tries)


def _again(plan: Plan, trouble: Trouble, checkpoint: int) -> Decision:
    if not trouble.damaged:
        says = f"{trouble}. Nothing was committed; retrying the step."
        return Decision(act="again", plan=plan, says=says)
    says = f"{trouble}. Rolling back to the checkpoint of step {checkpoint} to retry."
    return Decision(act="replay", plan=replace(plan, back_to=checkpoint), says=says)


def _cut(brakes: Brakes, plan: Plan, *, first: int) -> Plan:
    """Cut the learning rate from a step on, for twice as many steps as the last cut."""
    times = min(2**plan.num_cuts, LONGEST_CUT)
    last = first + times * brakes.lr_steps - 1
    cut = Cut(first=first, last=last, factor=brakes.lr_factor)
    earlier = tuple(c for c in plan.cuts if c.first < first or plan.back_to is None)
    return replace(plan, cuts=(*earlier, cut), num_cuts=plan.num_cuts + 1)


def _remedy(plan: Plan, trouble: Trouble, places: Sequence[int]) -> str:
    cut = plan.cuts[-1]
    factor = plan.lr_factor(cut.first)
    rate = f"learning rate x {factor:g} for steps {cut.first} to {cut.last}"
    if not trouble.blames_batch:
        return rate
    named = ", ".join(map(str, places))
    return f"batch{'es' if len(places) > 1 else ''} {named} skipped, {rate}"


def _stopped(trouble: Trouble, plan: Plan, checkpoint: int) -> str:
    return (
        f"{trouble}: failed batch {plan.consecutive} in a row without a step after step "
        f"{plan.last_step}. {_ended(trouble, checkpoint)}"
    )


def _tired(trouble: Trouble, plan: Plan, checkpoint: int) -> str:
    return (
        f"{trouble}, after {plan.tries - 1} retries without a step after step "
        f"{plan.front}. {_ended(trouble, checkpoint)} Anomalies at changing steps often come "
        "from hardware."
    )


def _ended(trouble: Trouble, checkpoint: int) -> str:
    if trouble.damaged:
        return f"Stopped; the checkpoint of step {checkpoint} is the last healthy one."
    return "Stopped and saved; the step was not committed."
