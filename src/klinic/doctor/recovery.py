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

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from klinic.doctor.trouble import Trouble

LONGEST_CUT = 16  # times `lr_steps`: a cut doubles that often and no further

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
    tried: tuple[int, ...] | None = None
    """The step, and the places of its batches, that was last run again."""
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
        factor = 1.0
        for cut in self.cuts:
            factor *= cut.factor if cut.first <= step <= cut.last else 1.0
        return factor

    def next_place(self, place: int) -> int:
        """Return the next place of the data that is not left out.

        >>> Plan(skipped=(4, 5)).next_place(3)
        6
        """
        place += 1
        while place in self.skipped:
            place += 1
        return place

    def without_rollback(self) -> "Plan":
        """Return the plan once a rollback is done."""
        return replace(self, back_to=None)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Plan":
        """Return the plan that `to_json` wrote."""
        lists = {name: tuple(values[name]) for name in ("skipped", "known")}
        tried = None if values["tried"] is None else tuple(values["tried"])
        cuts = tuple(Cut(**cut) for cut in values["cuts"])
        return cls(**{**values, **lists, "tried": tried, "cuts": cuts})


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
    here = (step, *places)
    if trouble.is_mild and trouble.site in plan.known:
        return Decision(act="go on", plan=plan, says="")
    if trouble.may_pass and plan.tried != here:
        return _again(replace(plan, tried=here), trouble, checkpoint)
    if trouble.is_mild:
        plan = replace(plan, known=(*plan.known, str(trouble.site)), tried=None)
        says = f"{trouble}, again: persistent. Such rows are left out from now on."
        return Decision(act="go on", plan=plan, says=says)
    consecutive = plan.consecutive + 1 if step <= plan.last_step else 1
    plan = replace(plan, last_step=max(step, plan.last_step), consecutive=consecutive)
    if consecutive >= brakes.max_consecutive:
        return Decision(act="stop", plan=plan, says=_stopped(trouble, step, consecutive))
    if trouble.blames_batch:
        plan = replace(plan, skipped=(*plan.skipped, *places))
    if not trouble.damaged and consecutive == 1:
        plan = _cut(brakes, plan, first=step)
        return Decision(act="skip", plan=plan, says=_skipped(trouble, plan))
    plan = _cut(brakes, replace(plan, back_to=checkpoint), first=checkpoint + 1)
    return Decision(act="roll back", plan=plan, says=_rolled_back(trouble, plan))


def passed(plan: Plan, *, step: int, places: Sequence[int]) -> bool:
    """Whether a step that has come out well is one that was run again."""
    return plan.tried == (step, *places)


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


def _skipped(trouble: Trouble, plan: Plan) -> str:
    return f"{trouble}, again: persistent. {_remedy(plan, trouble)}."


def _rolled_back(trouble: Trouble, plan: Plan) -> str:
    again = ", again: persistent" if trouble.may_pass else ""
    return f"{trouble}{again}. Going back to the checkpoint of step {plan.back_to}: " + (
        f"{_remedy(plan, trouble)}."
    )


def _remedy(plan: Plan, trouble: Trouble) -> str:
    cut = plan.cuts[-1]
    rate = f"learning rate x {cut.factor:g} for steps {cut.first} to {cut.last}"
    return f"batch {plan.skipped[-1]} is left out, {rate}" if trouble.blames_batch else rate


def _stopped(trouble: Trouble, step: int, consecutive: int) -> str:
    return (
        f"{trouble}, and it is batch {consecutive} in trouble without a step between. Stopped at "
        f"step {step}; the weights are those of the last step that was well."
    )
