"""What to do about trouble: decisions alone, carried out by the loop.

    1  again      the step is dropped and run once more: trouble that is gone was a transient
    2  skip       it is there again: the batch is left out, the learning rate is cut for a while,
                  and the step goes on with the next batch
    3  roll back  the second batch in a row, or weights that are damaged: back to a checkpoint, and
                  on without the batch, at the lower rate
    4  stop       too many in a row

All that was decided is in a plan: which batches are left out, and at which steps the rate is lower.
A run is a function of recipe, seed and plan, so one that is killed in the middle of a rollback and
resumed comes to the same weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from klinic.doctor.trouble import Trouble

LONGEST_CUT = 16  # times `lr_steps`: a cut doubles that often and no further
DEEPEST = 2  # cuts that count at once: below the second, nothing would be learnt any more
TRIES = 2  # times `max_consecutive`: second tries without a step beyond all others

Act = Literal["again", "replay", "go on", "skip", "roll back", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Brakes:
    """How hard to brake, from the recipe."""

    lr_factor: float = 0.1
    lr_steps: int = 50
    max_consecutive: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Steps, both included, at which the learning rate is multiplied by a factor."""

    first: int
    last: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that was decided so far; plain values that survive JSON exactly."""

    skipped: tuple[int, ...] = ()
    """Places in the data whose batches are left out."""
    cuts: tuple[Cut, ...] = ()
    num_cuts: int = 0
    """How often the rate was cut; a rollback makes cuts void that came after its checkpoint."""
    known: tuple[str, ...] = ()
    """Sites of mild trouble that stays: not worth another try each time."""
    tried: tuple[int, int] | None = None
    """The step, and the first place of its batches, that was last run again."""
    front: int = 0
    tries: int = 0
    """Second tries since one of a step beyond `front`."""
    last_step: int = 0
    consecutive: int = 0
    """Batches in trouble since a step beyond `last_step` was made."""
    back_to: int | None = None
    """The checkpoint a rollback goes to, until it is there."""

    def lr_factor(self, step: int) -> float:
        """Return what the learning rate of a step is multiplied by.

        >>> Plan(cuts=(Cut(first=3, last=4, factor=0.1),)).lr_factor(4)
        0.1
        """
        active = sorted(cut.factor for cut in self.cuts if cut.first <= step <= cut.last)
        return math.prod(active[:DEEPEST], start=1.0)

    def next_place(self, place: int) -> int:
        """Return the next place of the data that is not left out.

        >>> Plan(skipped=(4, 5)).next_place(3)
        6
        """
        place += 1
        while place in self.skipped:
            place += 1
        return place

    def without_try(self) -> "Plan":
        """Return the plan once a step that was run again has come out well."""
        return replace(self, tried=None)

    def without_rollback(self) -> "Plan":
        """Return the plan once a rollback is done."""
        return replace(self, back_to=None)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Plan":
        """Return the plan that `to_json` wrote; other values may stand beside it."""
        own = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        lists = {name: tuple(values[name]) for name in ("skipped", "known")}
        tried = None if values["tried"] is None else tuple(values["tried"])
        cuts = tuple(Cut(**cut) for cut in values["cuts"])
        return cls(**{**own, **lists, "tried": tried, "cuts": cuts})


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, the plan from then on, and a sentence for people."""

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
    """Return what to do about trouble at a step, whose batches are at these places of the data.

    `checkpoint` is the step of the one that a rollback would go to.
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
        says = f"{trouble}, again: persistent. Such rows are left out from now on."
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
    """Return what to do about trouble that another try would not end."""
    consecutive = plan.consecutive + 1 if step <= plan.last_step else 1
    plan = replace(plan, last_step=max(step, plan.last_step), consecutive=consecutive)
    if consecutive >= brakes.max_consecutive:
        return Decision(act="stop", plan=plan, says=_stopped(trouble, plan, checkpoint))
    if trouble.blames_batch:
        plan = replace(plan, skipped=(*plan.skipped, *places))
    if not trouble.damaged and consecutive == 1:
        plan = _cut(brakes, plan, first=step)
        says = f"{trouble}, again: persistent. {_remedy(plan, trouble, places)}."
        return Decision(act="skip", plan=plan, says=says)
    plan = _cut(brakes, replace(plan, back_to=checkpoint), first=checkpoint + 1)
    again = ", again: persistent" if trouble.may_pass else ""
    says = (
        f"{trouble}{again}. Going back to the checkpoint of step {checkpoint}: "
        f"{_remedy(plan, trouble, places)}."
    )
    return Decision(act="roll back", plan=plan, says=says)


def passed(plan: Plan, *, step: int, places: Sequence[int]) -> bool:
    """Whether a step that has come out well is one that was run again."""
    return plan.tried == (step, places[0])


def _tried(plan: Plan, here: tuple[int, int]) -> Plan:
    """Count a second try; a step that was never reached before starts the count anew."""
    further = here[0] > plan.front
    tries = 1 if further else plan.tries + 1
    return replace(plan, tried=here, front=max(here[0], plan.front), tries=tries)


def _again(plan: Plan, trouble: Trouble, checkpoint: int) -> Decision:
    if not trouble.damaged:
        says = f"{trouble}. Nothing was committed; running the step again."
        return Decision(act="again", plan=plan, says=says)
    says = f"{trouble}. Going back to the checkpoint of step {checkpoint}, to run it again."
    return Decision(act="replay", plan=replace(plan, back_to=checkpoint), says=says)


def _cut(brakes: Brakes, plan: Plan, *, first: int) -> Plan:
    """Cut the rate from a step on, for twice as long as the last time."""
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
    return f"batch{'es' if len(places) > 1 else ''} {named} left out, {rate}"


def _stopped(trouble: Trouble, plan: Plan, checkpoint: int) -> str:
    return (
        f"{trouble}, and it is batch {plan.consecutive} in trouble without a step beyond step "
        f"{plan.last_step}. {_ended(trouble, checkpoint)}"
    )


def _tired(trouble: Trouble, plan: Plan, checkpoint: int) -> str:
    return (
        f"{trouble}, after {plan.tries - 1} steps that had to be run again without one beyond step "
        f"{plan.front}. {_ended(trouble, checkpoint)} Trouble that moves is often a machine's."
    )


def _ended(trouble: Trouble, checkpoint: int) -> str:
    if trouble.damaged:
        return f"Stopped; the checkpoint of step {checkpoint} is the last that was well."
    return "Stopped and saved; nothing of it was committed."
