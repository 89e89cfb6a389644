"""wrong-groups: advantages are not those of their group's rewards."""

import math
from dataclasses import replace

import numpy as np

from klinic.checks.advantage_grouping import Grouping, explain_advantages
from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.measures import no_whole_group_finding, rms, whole_groups
from klinic.evidence.verdict import Verdict

MAX_SUM_FRACTION = 0.01  # fraction of a group's absolute advantages; float32 leaves 1e-6
RELATIVE_ROUNDING = (
    1e-6  # relative, of rewards: the float32 mean of equal values can differ from them
)
STD_FLOOR = 1e-6  # the least that a trainer adds to a standard deviation that divides: verl
MIN_COPIED_GROUPS = 3
MAX_CHANCE = 1e-3  # that so many groups fit others at one distance
GROUPS_ONLY = ("slime", "miles")  # they normalise rewards within groups, if at all by row
CENTRED_ADVANTAGES = ("group_mean", "leave_one_out", "group_std")


def judge_case(case: Case) -> Finding:
    """Flag advantages that were computed from other rewards than those of their group.

    Looks for
        The sum of the advantages of each group over the sum of their absolute values. Rewards
        minus their group mean sum to 0, for every group size and spread. Then the shape of each
        group's advantages: a positive multiple of its own centred rewards, a negative one, or
        one of another group's. If they have neither, the rows whose rewards explain them: the
        whole batch, rows with one prompt, consecutive rows, rows some places on. Rows that were
        moved after scoring, found by their token ids.
        Groups with fewer rows than the group size are left out: a loop dropped rows, or trains on
        them later. And groups of one prompt of the dataset to which the reset of an environment
        added different texts.
    Why it matters
        Completions are rewarded for an easy prompt, or for the luck of one that serves as the
        baseline. Groups of equal rewards get a gradient, and
        informative groups get that of another one.
    Confirmed when
        A group's sum is above 1% of its absolute advantages; or groups' advantages do not have
        the shape of their own rewards, and are swapped with one another's, or are those of the
        group a fixed number of places before, or rows were moved and their advantages were not;
        or other rows explain 95% of them, and their own group less than half;
        or all of them have the opposite sign; or a reset gave the members of a group different
        prompts.
    Ruled out when
        Every group sums to 0, and has the shape of its own rewards if those are recorded.
    Confused with
        advantage-explodes (groups sum to 0, single advantages are impossible); broken-reward
        (the advantages fit the rewards, which are wrong).
    """
    record = case.record
    is_batch = case.run["advantage"] == "batch" and case.run.get("trainer") in GROUPS_ONLY
    if is_batch and (found := confirm_grouping(case)) is not None:
        return found
    if (decided := _judge_grouping(case)) is not None:
        return decided
    finding = _judge_advantages(case)
    grouping = case.measure_once(explain_advantages, record)
    if grouping is None or (grouping.is_whole_batch and finding.verdict is not Verdict.FAIL):
        return finding
    if finding.verdict is not Verdict.FAIL:
        return _explained_finding(grouping)
    return replace(finding, summary=f"{finding.summary}; they are {_describe(grouping)}")


def confirm_grouping(case: Case) -> Finding | None:
    """Confirm the cause for an unknown estimator: other rows than a group's explain the advantages.

    Advantages over the whole batch are a choice, except in trainers that have no such estimator.
    """
    grouping = case.measure_once(explain_advantages, case.record)
    if grouping is None or (grouping.is_whole_batch and case.run.get("trainer") not in GROUPS_ONLY):
        return None
    return _explained_finding(grouping)


def _explained_finding(grouping: Grouping) -> Finding:
    return failed_finding(
        f"the advantages are {_describe(grouping)}", explained_rows=grouping.fraction
    )


def _describe(grouping: Grouping) -> str:
    return f"those of the rewards of {grouping.rows}, which explain {grouping.fraction:.0%} of them"


def _judge_advantages(case: Case) -> Finding:
    """Judge sums and shapes of the advantages of each group."""
    record = case.record
    assert record.advantage is not None  # noqa: S101 - needed
    reward = np.zeros(record.num_rows) if record.reward is None else record.reward
    used = whole_groups(case, record) & np.isfinite(record.advantage) & np.isfinite(reward)
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
    if record.reward is None:
        is_centred = sum_fraction <= MAX_SUM_FRACTION
        return (passed_finding if is_centred else failed_finding)(summary, share=sum_fraction)
    shapes = rows.unit_shapes(advantage, rounding), rows.unit_shapes(reward, noise)
    if left_behind := _judge_moved_rows(case, rows, *shapes):
        return left_behind
    if sum_fraction > MAX_SUM_FRACTION:
        if bool((rows.group_rms(shapes[0] - shapes[1]) <= MAX_SUM_FRACTION).all()):
            summary += ", and follow their own rewards: the baseline is not the group's mean"
        return failed_finding(summary, share=sum_fraction)
    return _judge_shapes(rows, *shapes) or passed_finding(summary, share=sum_fraction, swapped=0.0)


def _judge_grouping(case: Case) -> Finding | None:
    """Return a finding if the groups cannot be compared, or should not have been."""
    record = case.record
    if case.run["advantage"] not in CENTRED_ADVANTAGES:
        return no_data_finding(f"advantage {case.run['advantage']} does not sum to 0 within groups")
    if num_split := int(record.facts.get("num_split_groups") or 0):
        return failed_finding(
            f"{num_split} groups hold completions of different prompts (limit 0): the "
            "environment's reset() returned another first observation for each member, so rewards "
            "of different tasks are compared",
            split=float(num_split),
        )
    if record.num_rows and not whole_groups(case, record).any():
        return no_whole_group_finding(case)
    return None


def _judge_shapes(
    rows: "_GroupedRows", advantage_shapes: np.ndarray, reward_shapes: np.ndarray
) -> Finding | None:
    """Return a finding if advantages belong to other groups' rewards."""
    if num := _num_negated_groups(rows, advantage_shapes, reward_shapes):
        summary = f"the advantages of all {num} groups with different rewards have the wrong sign"
    elif num := _num_swapped_groups(rows, advantage_shapes, reward_shapes):
        summary = f"the advantages of {num} groups belong to one another's rewards"
    elif num := _num_copied_groups(rows, advantage_shapes, reward_shapes):
        summary = f"the advantages of {num} groups are those of other groups' rewards"
    else:
        return None
    return failed_finding(summary, swapped=float(num))


def _judge_moved_rows(
    case: Case, rows: "_GroupedRows", advantage_shapes: np.ndarray, reward_shapes: np.ndarray
) -> Finding | None:
    """Return a finding if rows were moved and the advantages fit the rewards of other rows.

    Rows that move together with their advantages are a choice; another shaping of the advantage
    without moved rows is judged by the sums.
    """
    num_moved = int(case.record.facts.get("num_moved_rows") or 0)
    if not num_moved or case.record.reward is None:
        return None
    misfits = rows.group_rms(advantage_shapes - reward_shapes) > MAX_SUM_FRACTION
    if not misfits.any():
        return None
    summary = (
        f"{num_moved} of {case.record.num_rows} rows were moved after scoring, and the advantages "
        f"of {int(misfits.sum())} groups do not fit their rewards: they stayed behind"
    )
    return failed_finding(summary, moved=float(num_moved), groups=float(misfits.sum()))


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


def _num_negated_groups(
    rows: _GroupedRows, advantage_shapes: np.ndarray, reward_shapes: np.ndarray
) -> int:
    """Return the number of groups if all have the negative of their own rewards; else 0."""
    is_spread = rows.group_rms(reward_shapes) > 0
    is_negated = rows.group_rms(advantage_shapes + reward_shapes) <= MAX_SUM_FRACTION
    num = int(is_spread.sum())
    return num if num >= MIN_COPIED_GROUPS and is_negated[is_spread].all() else 0


def _num_copied_groups(
    rows: _GroupedRows, advantage_shapes: np.ndarray, reward_shapes: np.ndarray
) -> int:
    """Return the number of groups with the advantages of the group some places before; else 0.

    The distance must be the same for all of them: processes that use the first one's advantages.
    A group fits another one by chance if its rewards came in just that order.
    """
    size = int(rows.group_sizes[0])
    if (rows.group_sizes != size).any():
        return 0
    order = np.argsort(rows.group, kind="stable")
    advantages, rewards = (
        shapes[order].reshape(-1, size) for shapes in (advantage_shapes, reward_shapes)
    )
    misfits = np.flatnonzero(_distance(advantages, rewards) > MAX_SUM_FRACTION)
    if len(misfits) < MIN_COPIED_GROUPS:
        return 0
    num_groups = len(rewards)
    for distance in range(1, num_groups):
        others = rewards[(misfits - distance) % num_groups]
        if (_distance(advantages[misfits], others) <= MAX_SUM_FRACTION).all():
            orders = math.prod(_num_orders(other) for other in others)
            return len(misfits) if num_groups < MAX_CHANCE * orders else 0
    return 0


def _num_orders(values: np.ndarray) -> int:
    """Return the number of different orders of values."""
    counts = np.unique(np.round(values, 3), return_counts=True)[1]
    return math.factorial(len(values)) // math.prod(math.factorial(int(n)) for n in counts)


def _distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt(np.mean(np.square(one - other), axis=-1)))


def _all_among(shapes: list[np.ndarray], candidates: list[np.ndarray]) -> bool:
    def are_equal(one: np.ndarray, other: np.ndarray) -> bool:
        return len(one) == len(other) and rms(one - other) <= MAX_SUM_FRACTION

    return all(any(are_equal(shape, other) for other in candidates) for shape in shapes)


CHECK = Check(
    name="wrong-groups",
    description="advantages are those of other groups, of another baseline or of opposite sign",
    stage=Stage.ADVANTAGE,
    needs=("record.advantage", "run.advantage"),
    fix="Group rewards by prompt id, not by their position in the batch, subtract the mean of the "
    "whole group, and move advantages with their rows. Let an environment's reset() return the "
    "same observation for all members of a group: seed it from the row of the dataset.",
    judge=judge_case,
    confirm=confirm_grouping,
    reads=(
        "facts.num_moved_rows",
        "facts.num_split_groups",
        "record.reward",
        "record.group",
        "record.prompt_index",
        "record.prompt_ids",
        "record.prompt_offsets",
        "record.sample",
        "run.group_size",
        "run.trainer",
    ),
)
