"""advantage-explodes: rewards are divided by a standard deviation close to 0."""

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
from klinic.checks.measures import equal_completions, no_whole_group_finding, whole_groups
from klinic.evidence.record import StepRecord

MAX_BOUND_RATIO = 1.01  # rounding of rewards stored in float32
MAX_TINY_RATIO = 0.01  # of the deviation of another group, or of all rewards: equal but for noise
MIN_TINY_FRACTION = 0.2  # of the groups
MIN_NOISY_REPEATS = 0.5  # of the completions that come twice in such groups: others may be graded
ROUNDING = 1e-6  # of that deviation: the one of equal rewards
MIN_UNIT = 0.5  # root mean square of advantages that were divided by such a deviation
UNKNOWN_RATIO = 10.0  # times bound and range of the rewards, if the estimator is unknown
DIVIDING_ADVANTAGES = ("group_std", "batch")


def judge_case(case: Case) -> Finding:
    """Flag advantages that no group of that size can have.

    Looks for
        The largest distance of an advantage from the mean of its group's, against the bound
        that division by the group's own standard deviation implies: for n rewards, at most
        sqrt(n - 1) with the deviation over n, and (n - 1) / sqrt(n) with the one over n - 1.
        And groups whose rewards deviate by less than 1% of what those of another group, or of
        all, do, if half of the completions that come twice in such groups have different rewards.
        Groups with fewer rows than the group size are left out: other rewards are behind their
        deviation.
    Why it matters
        One completion with an advantage of hundreds dominates the gradient of its step. After
        gradient clipping, the only visible symptom is a jump of the KL.
    Confirmed when
        An advantage is above sqrt(n - 1): its standard deviation excludes the completion
        itself, is rounding noise, or has no floor. Or a fifth of the groups have rewards that
        are equal but for noise, which the division scales to ordinary advantages. If the
        estimator is unknown: an advantage is ten times the bound and ten times the range of all
        rewards.
    Ruled out when
        All advantages are within the bound of their group.
    Confused with
        wrong-groups (advantages do not sum to 0 within a group, and less their mean no single
        one is impossible); rewards that are large and not divided (then there is no bound).
    """
    record = case.record
    if case.run.get("advantage") is None:
        return _judge_by_rewards(record)
    if case.run["advantage"] not in DIVIDING_ADVANTAGES:
        return passed_finding(
            f"advantage {case.run['advantage']} is not divided by a standard deviation"
        )
    assert record.advantage is not None  # noqa: S101 - needed
    num_rows = _normalised_rows(case)
    used = num_rows > 0
    if record.num_rows and not used.any():
        if case.run["advantage"] == "batch":
            return no_data_finding("rows of the batch are missing, and its size is not recorded")
        return no_whole_group_finding(case)
    bound = np.sqrt(np.maximum(num_rows - 1, 1))
    # another baseline than the mean shifts a group as a whole: wrong-groups looks for it
    centred = record.advantage - _group_means(record.advantage, record.group)[record.group]
    used &= np.isfinite(centred)
    bound_ratio = float(np.max((np.abs(centred) / bound)[used], initial=0.0))
    summary = (
        f"the largest advantage is {bound_ratio:.3g} times the "
        f"bound of its group (limit {MAX_BOUND_RATIO:g})"
    )
    noisy = _scaled_noise_fraction(record, whole_groups(case, record))
    if bound_ratio <= MAX_BOUND_RATIO and noisy > MIN_TINY_FRACTION:
        return failed_finding(
            f"{noisy:.0%} of the groups have rewards that deviate by less than "
            f"{MAX_TINY_RATIO:.0%} of all rewards, differ between equal completions, and "
            f"give ordinary advantages (limit {MIN_TINY_FRACTION:.0%})",
            noisy=noisy,
        )
    return (failed_finding if bound_ratio > MAX_BOUND_RATIO else passed_finding)(
        summary, share_of_bound=bound_ratio
    )


def _judge_by_rewards(record: StepRecord) -> Finding:
    """Judge advantages of an unknown estimator: only a division makes them far exceed rewards."""
    if record.reward is None or record.advantage is None:
        return no_data_finding("not recorded: `run.advantage`, or rewards in its place")
    reward = record.reward[np.isfinite(record.reward)]
    advantage = record.advantage[np.isfinite(record.advantage)]
    if not reward.size or not advantage.size:
        return no_data_finding("no finite reward or advantage")
    largest = float(np.abs(advantage).max())
    bound = float(np.sqrt(max(np.bincount(record.group).max() - 1, 1)))
    limit = UNKNOWN_RATIO * max(bound, float(np.ptp(reward)))
    if largest <= limit:
        return no_data_finding(f"not recorded: `run.advantage`; the largest is {largest:.3g}")
    return failed_finding(
        f"the largest advantage is {largest:.3g}, and all rewards lie within "
        f"{float(np.ptp(reward)):.3g} (limit {limit:.3g})",
        share_of_bound=largest / bound,
    )


def _scaled_noise_fraction(record: StepRecord, is_whole: np.ndarray) -> float:
    """Return the fraction of whole groups whose advantages are scaled noise of their rewards."""
    if record.reward is None or not np.isfinite(record.reward).all():
        return 0.0
    advantage, reward = (np.asarray(c, np.float64) for c in (record.advantage, record.reward))
    size = np.bincount(record.group, is_whole)
    centred = np.where(is_whole, reward - _group_means(reward, record.group)[record.group], 0.0)
    deviation = np.sqrt(np.bincount(record.group, centred**2) / np.maximum(size, 1))
    squares = np.where(is_whole, np.nan_to_num(advantage) ** 2, 0.0)
    is_unit = np.sqrt(np.bincount(record.group, squares) / np.maximum(size, 1)) > MIN_UNIT
    spread = max(
        deviation.max(initial=0.0), float(reward[is_whole].std()) if is_whole.any() else 0.0
    )
    ratio = deviation / max(spread, np.finfo(float).tiny)
    is_scaled = is_unit & (ratio < MAX_TINY_RATIO) & (ratio > ROUNDING)
    equal = [rows for rows in equal_completions(record) if len(rows) > 1]
    repeats = [rows for rows in equal if is_scaled[record.group[rows[0]]]]
    differing = sum(bool(np.ptp(reward[rows]) > 0) for rows in repeats)
    if not size.any() or differing <= MIN_NOISY_REPEATS * len(repeats):
        return 0.0
    return float(is_scaled[size > 0].mean())


def _normalised_rows(case: Case) -> np.ndarray:
    """Return for each row the number of rewards behind its deviation; 0 if some are elsewhere."""
    record, is_whole = case.record, whole_groups(case, case.record)
    if case.run["advantage"] != "batch":
        return np.where(is_whole, np.bincount(record.group)[record.group], 0)
    num_generated = record.facts.get("generation_rows")
    if num_generated is None:
        return np.full(record.num_rows, record.num_rows if is_whole.all() else 0)
    return np.full(record.num_rows, max(record.num_rows, int(num_generated)))


def _group_means(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return the mean of the finite values of each group."""
    used = np.isfinite(values)
    size = np.bincount(group[used], minlength=int(group.max(initial=-1)) + 1)
    return np.asarray(np.bincount(group[used], values[used], len(size)) / np.maximum(size, 1))


CHECK = Check(
    name="advantage-explodes",
    description="rewards are divided by a standard deviation close to 0, or by that of noise",
    stage=Stage.ADVANTAGE,
    needs=("record.advantage", "record.group"),
    fix="Do not divide by the standard deviation (learner.advantage leave_one_out) or add a floor.",
    judge=judge_case,
    change={"learner.advantage": "leave_one_out"},
    optional_needs=("run.advantage",),
    explains=("wrong-groups",),  # a leave-one-out deviation also leaves a nonzero sum
    reads=(
        "record.reward",
        "record.token_ids",
        "record.row_offsets",
        "run.group_size",
        "facts.generation_rows",
    ),
)
