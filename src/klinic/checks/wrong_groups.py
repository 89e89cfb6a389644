"""wrong-groups: rewards are compared across prompts."""

import numpy as np

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.measures import rms

MAX_SUM_FRACTION = 0.01  # fraction of a group's absolute advantages; float32 leaves 1e-6
RELATIVE_ROUNDING = (
    1e-6  # relative, of rewards: the float32 mean of equal values can differ from them
)
STD_FLOOR = 1e-4  # of a standard deviation that divides
CENTRED_ADVANTAGES = ("group_mean", "leave_one_out", "group_std")


def judge_case(case: Case) -> Finding:
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
    if case.run["advantage"] not in CENTRED_ADVANTAGES:
        return no_data_finding(f"advantage {case.run['advantage']} does not sum to 0 within groups")
    assert record.advantage is not None  # noqa: S101 - needed
    reward = np.zeros(record.num_rows) if record.reward is None else record.reward
    used = np.isfinite(record.advantage) & np.isfinite(reward)
    rows = _GroupedRows(record.group[used])
    advantage, reward = record.advantage[used], reward[used]
    noise = RELATIVE_ROUNDING * rows.group_rms(reward)
    rounding = (
        noise / (STD_FLOOR + rows.group_std(reward))
        if case.run["advantage"] == "group_std"
        else noise
    )
    sums = np.maximum(np.abs(rows.group_sum(advantage)) - rows.group_sizes * rounding, 0.0)
    sum_fraction = float(
        np.max(sums / np.maximum(rows.group_sum(np.abs(advantage)), 1e-12), initial=0.0)
    )
    summary = (
        f"a group's advantages sum to {sum_fraction:.2%} of their "
        f"absolute sum (limit {MAX_SUM_FRACTION:.0%})"
    )
    if sum_fraction > MAX_SUM_FRACTION or record.reward is None:
        return (failed_finding if sum_fraction > MAX_SUM_FRACTION else passed_finding)(
            summary, share=sum_fraction
        )
    num_swapped = _num_swapped_groups(
        rows, rows.unit_shapes(advantage, rounding), rows.unit_shapes(reward, noise)
    )
    if num_swapped:
        summary = f"the advantages of {num_swapped} groups belong to one another's rewards"
    return (failed_finding if num_swapped else passed_finding)(
        summary, share=sum_fraction, swapped=float(num_swapped)
    )


class _GroupedRows:
    """Per-group statistics of row values."""

    def __init__(self, group: np.ndarray) -> None:
        self.group = group
        self.group_sizes = np.maximum(np.bincount(group), 1)

    def group_sum(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.group, weights=values)

    def group_rms(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(np.sqrt(self.group_sum(np.square(values)) / self.group_sizes))

    def subtract_group_mean(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(values - (self.group_sum(values) / self.group_sizes)[self.group])

    def group_std(self, values: np.ndarray) -> np.ndarray:
        return self.group_rms(self.subtract_group_mean(values))

    def unit_shapes(self, values: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Return the values centred and scaled to unit deviation within each group."""
        centred = self.subtract_group_mean(values)
        spread = self.group_rms(centred)
        scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > noise)
        return np.asarray(centred * scale[self.group])


def _num_swapped_groups(
    rows: _GroupedRows, advantage_shapes: np.ndarray, reward_shapes: np.ndarray
) -> int:
    """Return the number of groups with one another's advantages; 0 if one matches no group."""
    mismatched = np.flatnonzero(rows.group_rms(advantage_shapes - reward_shapes) > MAX_SUM_FRACTION)
    actual = [advantage_shapes[rows.group == group] for group in mismatched]
    expected = [reward_shapes[rows.group == group] for group in mismatched]
    is_permutation = _all_among(actual, expected) and _all_among(expected, actual)
    return len(mismatched) if is_permutation else 0


def _all_among(shapes: list[np.ndarray], candidates: list[np.ndarray]) -> bool:
    def are_equal(one: np.ndarray, other: np.ndarray) -> bool:
        return len(one) == len(other) and rms(one - other) <= MAX_SUM_FRACTION

    return all(any(are_equal(shape, other) for other in candidates) for shape in shapes)


CHECK = Check(
    name="wrong-groups",
    description="rewards are compared across prompts",
    stage=Stage.ADVANTAGE,
    needs=("record.advantage", "run.advantage"),
    fix="Group rewards by prompt id, not by their position in the batch.",
    judge=judge_case,
    reads=(
        "record.reward",
        "record.group",
        "record.prompt_index",
        "record.prompt_ids",
        "record.prompt_offsets",
        "record.sample",
        "run.group_size",
    ),
)
