"""wrong-groups: rewards are compared across prompts."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import rms

SHARE = 0.01  # of a group's absolute advantages; float32 leaves 1e-6
ROUNDING = 1e-6  # of rewards; a mean of equal ones in 32 bits is not always the one
FLOOR = 1e-4  # of a spread that is divided by
CENTRED = ("group_mean", "leave_one_out", "group_std")


def judge(case: Case) -> Finding:
    """Flag advantages that were made of other prompts' rewards.

    Looks for
        The sum of the advantages of each group over the sum of their sizes. Rewards less a mean of
        their own group sum to 0, whatever the group's size and spread. Then the shape of each
        group's advantages: a positive multiple of its own rewards less their mean, or one of
        another group's.
    Why it matters
        Completions are praised for having an easy prompt. Groups of equal rewards get a gradient,
        and those that could teach something get another one's.
    Confirmed when
        A group's sum is above 1% of its absolute advantages; or groups' advantages do not have the
        shape of their own rewards, and change places with one another's.
    Ruled out when
        Every group sums to 0, and has the shape of its own rewards where those are recorded.
    Confused with
        advantage-explodes (groups sum to 0, single advantages are impossible); broken-reward (the
        advantages fit the rewards, which are wrong).
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
    summary = f"a group's advantages sum to {share:.2%} of their size (limit {SHARE:.0%})"
    if share > SHARE or record.reward is None:
        return (failed if share > SHARE else passed)(summary, share=share)
    swapped = _swapped(rows, rows.shapes(advantage, left), rows.shapes(reward, noise))
    if swapped:
        summary = f"the advantages of {swapped} groups are those of one another's rewards"
    return (failed if swapped else passed)(summary, share=share, swapped=float(swapped))


class _Rows:
    """Numbers of rows, group by group."""

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
        """Return what is left of values when a group's mean and scale do not count."""
        centred = self.centred(values)
        spread = self.rms(centred)
        scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > noise)
        return np.asarray(centred * scale[self.group])


def _swapped(rows: _Rows, given: np.ndarray, earned: np.ndarray) -> int:
    """Return how many groups have one another's advantages; 0 if one has nobody's."""
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
    fix="Group rewards by the id of their prompt, not by their place in the batch.",
    judge=judge,
)
