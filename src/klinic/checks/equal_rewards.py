"""equal-rewards: groups of equal rewards leave nothing to learn from."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import known_rewards
from klinic.evidence.record import StepRecord

SHARE = 0.9  # of the groups; half of them equal is usual, and some runs sample again instead
STEPS = 3  # in a row: a single step can be unlucky


def judge(case: Case) -> Finding:
    """Flag steps in which hardly any group has two different rewards.

    Looks for
        The share of groups whose rewards are all the same, over the last three steps, and whether
        they are all at the top or all at the bottom of what was seen.
    Why it matters
        An advantage is a difference within a group. Where there is none, the gradient is 0 but
        for the KL term: loss 0, nothing learnt, and no error anywhere.
    Confirmed when
        Nine of ten groups are equal in three steps in a row.
    Ruled out when
        More than one in ten groups has something to compare.
    Confused with
        policy-does-not-move (advantages are not 0, the gradient is); broken-reward (rewards are
        missing or wrong); broken-sampler (completions are equal, so their rewards are).
    """
    last = case.window[-STEPS:]
    if len(last) < STEPS:
        return no_data(f"{len(last)} steps, and {STEPS} are needed")
    shares = [case.of(share_equal, record) for record in last]
    if any(share is None for share in shares):
        return no_data("no rewards, or groups of one")
    least = min(share for share in shares if share is not None)
    rewards = np.concatenate([r.reward for r in last if r.reward is not None])
    summary = (
        f"{least:.0%} or more of the groups had equal rewards in {STEPS} steps (limit "
        f"{SHARE:.0%}); the mean reward is {np.nanmean(rewards):.3g}"
    )
    return (failed if least > SHARE else passed)(summary, share=least)


def share_equal(record: StepRecord) -> float | None:
    """Return the share of groups with equal rewards; None where nothing can be compared."""
    if record.reward is None:
        return None
    compared = [rewards for rewards in known_rewards(record) if len(rewards) > 1]
    equal = sum(bool((g == g[0]).all()) for g in compared)
    return equal / len(compared) if compared else None


CHECK = Check(
    name="equal-rewards",
    stage=Stage.ADVANTAGE,
    needs=("record.reward",),
    fix="Use easier or harder prompts, larger groups or graduated rewards, or sample other prompts "
    "instead (loop.extra_rounds); check the verifier on right answers.",
    judge=judge,
    change={"loop.extra_rounds": 2},
    explains=("cliff-rewards",),
)
