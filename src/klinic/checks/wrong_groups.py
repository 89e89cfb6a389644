"""wrong-groups: rewards are compared across prompts."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import rms

SHARE = 0.01  # fraction of a group's absolute advantages; float32 leaves 1e-6
ROUNDING = 1e-6  # relative, of rewards: the float32 mean of equal values can differ from them
FLOOR = 1e-4  # of a standard deviation that divides
CENTRED = ("group_mean", "leave_one_out", "group_std")


def judge(case: Case) -> Finding:
    """Flag advantages that were computed from other prompts' rewards.

    Looks for
        The sum of the advantages of each group over the sum of their absolute values. Rewards
        minus their group mean sum to 0, for every group size and spread. Then the shape of each
        group's advantages: a positive multiple of its own centred rewards, or one of another
        group's.
    Why it matters
        Completions are rewarded for an easy prompt. Groups of equal rewards get a gradient, and
        informative groups get that of another one.
    Confirmed when
        A group's sum is above 1% of its absolute advantages; or groups' advantages do not have
        the shape of their own rewards, and are swapped with one another's.
    Ruled out when
        Every group sums to 0, and has the shape of its own rewards if those are recorded.
    Confused with
        advantage-explodes (groups sum to 0, single advantages are impossible); broken-reward
        (the advantages fit the rewards, which are wrong).
    """
    record = case.record
    if case.run["advantage"] not in CENTRED:
        return no_data(f"advantage {case.run['advantage']} does not sum to 0 within groups")
    assert record.advantage is not None  # noqa: S101 - needed
    reward = np.zeros(record.num_rows) if record.reward is None else record.reward
    used = np.isfinite(record.advantage) & np.isfinite(reward)
    rows = _Rows(record.group[used])
    advantage, reward = record.advantage[used], reward[used]
    noise = ROUNDING * rows.rms(reward)
    left = noise / (FLOOR + rows.spread(reward)) if case.run["advantage"] == "group_std" else noise
    sums = np.maximum(np.abs(rows.sum(advantage)) - rows.num * left, 0.0)
    share = float(np.max(sums / np.maximum(rows.sum(np.abs(advantage)), 1e-12), initial=0.0))
    summary = f"a group's advantages sum to {share:.2%} of their absolute sum (limit {SHARE:.0%})"
    if share > SHARE or record.reward is None:
        return (failed if share > SHARE else passed)(summary, share=share)
    swapped = _swapped(rows, rows.shapes(advantage, left), rows.shapes(reward, noise))
    if swapped:
        summary = f"the advantages of {swapped} groups belong to one another's rewards"
    return (failed if swapped else passed)(summary, share=share, swapped=float(swapped))


class _Rows:
    """Per-group statistics of row values."""

    def __init__(self, group: np.ndarray) -> None:
        self.group = group
        self.num = np.maximum(np.bincount(group), 1)

    def sum(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.group, weights=values)

    def rms(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(np.sqrt(self.sum(np.square(values)) / self.num))

    def centred(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(values - (self.sum(values) / self.num)[self.group])

    def spread(self, values: np.ndarray) -> np.ndarray:
        return self.rms(self.centred(values))

    def shapes(self, values: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Return the values centred and scaled to unit deviation within each group."""
        centred = self.centred(values)
        spread = self.rms(centred)
        scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > noise)
        return np.asarray(centred * scale[self.group])


def _swapped(rows: _Rows, given: np.ndarray, earned: np.ndarray) -> int:
    """Return the number of groups with one another's advantages; 0 if one matches no group."""
    strange = np.flatnonzero(rows.rms(given - earned) > SHARE)
    had = [given[rows.group == group] for group in strange]
    due = [earned[rows.group == group] for group in strange]
    changed = _all_among(had, due) and _all_among(due, had)
    return len(strange) if changed else 0


def _all_among(shapes: list[np.ndarray], others: list[np.ndarray]) -> bool:
    def equal(one: np.ndarray, other: np.ndarray) -> bool:
        return len(one) == len(other) and rms(one - other) <= SHARE

    return all(any(equal(shape, other) for other in others) for shape in shapes)


CHECK = Check(
    name="wrong-groups",
    stage=Stage.ADVANTAGE,
    needs=("record.advantage", "run.advantage"),
    fix="Group rewards by prompt id, not by their position in the batch.",
    judge=judge,
)
