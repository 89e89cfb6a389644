"""broken-reward: rewards are missing, wrong, or in another order than the completions."""

import math
from collections import Counter

import numpy as np

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    ProbeEntry,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.measures import equal_completions, num_pairs

MAX_MISSING_FRACTION = 0.2  # fraction without a reward: more than an occasional timeout
MIN_SAME_FRACTION = 0.9  # fraction of completions that must get the same reward again
MAX_DIFFERING_FRACTION = (
    0.5  # fraction of equal pairs with different rewards: LLM judges are less noisy
)
MIN_PAIRS = 10  # pairs of equal completions


def judge_case(case: Case) -> Finding:
    """Flag rewards that do not belong to their completions.

    Looks for
        Completions without a reward; equal completions of one prompt with different rewards;
        and, if the task has reference answers, the reward of correct answers and the rewards of
        the same completions graded again in another order.
    Why it matters
        One None can make a batch NaN, a failing parser returns 0 forever, and a lost order
        trains on noise with a healthy-looking spread.
    Confirmed when
        A fifth of the rewards is missing; or half of the pairs of equal completions differ; or
        fewer than nine in ten completions get the same reward again; or, before training,
        correct answers get no more than wrong ones.
    Ruled out when
        Equal completions have equal rewards, and correct answers get the highest.
    Confused with
        equal-rewards (rewards are correct and all the same); reward-hacking (rewards follow
        their definition, and the definition can be exploited).
    """
    record = case.record
    assert record.reward is not None  # noqa: S101 - needed
    missing = float((~np.isfinite(record.reward)).mean()) if record.num_rows else 0.0
    pairs, differ = count_unequal_pairs(record.reward, case.measure_once(equal_completions, record))
    differing_fraction = differ / pairs if pairs else 0.0
    regrade = case.probe_results.get("regrade")
    regrade_fault = (
        "" if regrade is None else _regrade_fault(regrade, at_start=case.learner_version == 0)
    )
    figures = {"missing": missing, "pairs_differ": differing_fraction}
    if (
        missing > MAX_MISSING_FRACTION
        or (pairs >= MIN_PAIRS and differing_fraction > MAX_DIFFERING_FRACTION)
        or regrade_fault
    ):
        wrong = regrade_fault or (
            f"{missing:.0%} of the rewards are missing (limit "
            f"{MAX_MISSING_FRACTION:.0%}), and {differ} of "
            f"{pairs} pairs of equal completions have different "
            f"ones (limit {MAX_DIFFERING_FRACTION:.0%})"
        )
        return failed_finding(wrong, **figures)
    if pairs < MIN_PAIRS and regrade is None:
        return no_data_finding(
            f"{pairs} pairs of equal completions (of {MIN_PAIRS}), and no regrade probe"
        )
    return passed_finding(
        f"{missing:.0%} of the rewards are missing (limit "
        f"{MAX_MISSING_FRACTION:.0%}), {differ} of {pairs} "
        f"pairs of equal completions differ (limit {MAX_DIFFERING_FRACTION:.0%})",
        **figures,
    )


def _regrade_fault(regrade: ProbeEntry, *, at_start: bool) -> str:
    same, gold, wrong = (regrade.get(k) for k in ("same", "right_answers", "wrong_completions"))
    if same is not None and same < MIN_SAME_FRACTION:
        return (
            f"graded again in another order, {same:.0%} get the "
            f"same reward (limit {MIN_SAME_FRACTION:.0%})"
        )
    # after updates, wrong completions may get more because the reward is exploited
    if at_start and gold is not None and wrong is not None and gold <= wrong:
        return f"right answers get {gold:.3g}, wrong completions {wrong:.3g}: not more"
    return ""


def count_unequal_pairs(reward: np.ndarray, equal: list[list[int]]) -> tuple[int, int]:
    """Return the number of pairs of equal completions, and of those with unequal rewards."""
    pairs = differ = 0
    rounded = np.round(reward, 9).tolist()
    for rows in equal:
        counts = Counter(rounded[row] for row in rows if math.isfinite(rounded[row]))
        num_row_pairs = num_pairs(counts.total())
        pairs += num_row_pairs
        differ += num_row_pairs - sum(map(num_pairs, counts.values()))
    return pairs, differ


CHECK = Check(
    name="broken-reward",
    description="rewards are missing, wrong, or in another order than the completions",
    stage=Stage.ADVANTAGE,
    needs=("record.reward",),
    fix="Grade some correct answers by hand, return rewards in the order of the completions, and "
    "None for a completion without a reward.",
    judge=judge_case,
    explains=("equal-rewards", "reward-hacking", "step-too-big", "cliff-rewards"),
    reads=(
        "record.reward_parts",
        "record.group",
        "record.logp",
        "probes.regrade",
    ),
)
