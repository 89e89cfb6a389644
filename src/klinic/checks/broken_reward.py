"""broken-reward: rewards are missing, wrong, or in another order than the completions."""

import math
from collections import Counter

import numpy as np

from klinic.checks.base import Answer, Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import equal_completions, num_pairs

MISSING = 0.2  # fraction without a reward: more than an occasional timeout
SAME = 0.9  # fraction of completions that must get the same reward again
DIFFER = 0.5  # fraction of equal pairs with different rewards: LLM judges are less noisy
ENOUGH = 10  # pairs of equal completions


def judge(case: Case) -> Finding:
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
    pairs, differ = unequally_rewarded(record.reward, case.of(equal_completions, record))
    share = differ / pairs if pairs else 0.0
    asked = case.answers.get("regrade")
    graded = "" if asked is None else _graded(asked, at_start=case.version == 0)
    figures = {"missing": missing, "pairs_differ": share}
    if missing > MISSING or (pairs >= ENOUGH and share > DIFFER) or graded:
        wrong = graded or (
            f"{missing:.0%} of the rewards are missing (limit {MISSING:.0%}), and {differ} of "
            f"{pairs} pairs of equal completions have different ones (limit {DIFFER:.0%})"
        )
        return failed(wrong, **figures)
    if pairs < ENOUGH and asked is None:
        return no_data(f"{pairs} pairs of equal completions (of {ENOUGH}), and no regrade probe")
    return passed(
        f"{missing:.0%} of the rewards are missing (limit {MISSING:.0%}), {differ} of {pairs} "
        f"pairs of equal completions differ (limit {DIFFER:.0%})",
        **figures,
    )


def _graded(asked: Answer, *, at_start: bool) -> str:
    same, gold, wrong = (asked.get(k) for k in ("same", "right_answers", "wrong_completions"))
    if same is not None and same < SAME:
        return f"graded again in another order, {same:.0%} get the same reward (limit {SAME:.0%})"
    # after updates, wrong completions may get more because the reward is exploited
    if at_start and gold is not None and wrong is not None and gold <= wrong:
        return f"right answers get {gold:.3g}, wrong completions {wrong:.3g}: not more"
    return ""


def unequally_rewarded(reward: np.ndarray, equal: list[list[int]]) -> tuple[int, int]:
    """Return the number of pairs of equal completions, and of those with unequal rewards."""
    pairs = differ = 0
    rounded = np.round(reward, 9).tolist()
    for rows in equal:
        counts = Counter(rounded[row] for row in rows if math.isfinite(rounded[row]))
        of_all = num_pairs(counts.total())
        pairs += of_all
        differ += of_all - sum(map(num_pairs, counts.values()))
    return pairs, differ


CHECK = Check(
    name="broken-reward",
    stage=Stage.ADVANTAGE,
    needs=("record.reward",),
    fix="Grade some correct answers by hand, return rewards in the order of the completions, and "
    "None for a completion without a reward.",
    judge=judge,
    explains=("equal-rewards", "reward-hacking", "step-too-big", "cliff-rewards"),
)
