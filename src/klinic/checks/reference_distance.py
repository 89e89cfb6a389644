"""A distance of policy and reference that vanishes between two steps: one of them was replaced."""

from dataclasses import dataclass

from klinic.checks.base import Case
from klinic.checks.measures import rms_logp_gap

NUM_STEPS = 3  # steps before the jump that must agree with one another
MIN_DISTANCE = 0.01  # nats, root mean square: the policy had left its reference
MAX_REMAINING = 0.1  # of that distance: no update returns by nine tenths in a step
MAX_EQUAL_GAP = 1e-4  # nats, root mean square: one engine scores equal weights alike


@dataclass(frozen=True, slots=True, kw_only=True)
class VanishedDistance:
    """The distance of the steps before, at least, and that of this one."""

    before: float
    now: float

    @property
    def is_equal(self) -> bool:
        """Whether policy and reference are one now."""
        return self.now <= MAX_EQUAL_GAP


def find_vanished_distance(case: Case) -> VanishedDistance | None:
    """Return the distance that vanished in this step; None if none did or it is unknown."""
    records = [*(r for r in case.earlier if r.step < case.record.step), case.record]
    records = records[-NUM_STEPS - 1 :]
    if len(records) <= NUM_STEPS or any(r.logp_old is None or r.logp_ref is None for r in records):
        return None
    *distances, now = [rms_logp_gap(record, "logp_old", "logp_ref") for record in records]
    before = min(distances)
    if before <= MIN_DISTANCE or now > MAX_REMAINING * before:
        return None
    return VanishedDistance(before=before, now=now)


def has_other_weights(case: Case) -> bool:
    """Return whether the policy's weights are known not to be those of the first step."""
    if case.start is None:
        return False
    then, now = (r.facts.get("weights_published") for r in (case.start, case.record))
    return then is not None and now is not None and then != now
