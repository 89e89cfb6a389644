"""equal-rewards: groups of equal rewards carry no training signal."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import known_rewards
from klinic.evidence.record import StepRecord

SHARE = 0.9  # fraction of groups; half is usual, and some runs resample such groups
STEPS = 3  # consecutive: a single step can be chance


def judge(case: Case) -> Finding:
    """Flag steps in which hardly any group has two different rewards.

    Looks for
        The fraction of groups whose rewards are all equal, over the last three steps, and the
        mean reward.
    Why it matters
        An advantage is a difference within a group. Without a difference, the gradient is 0
        except for the KL term: loss 0, no learning, and no error anywhere.
    Confirmed when
        Nine of ten groups have equal rewards in three consecutive steps.
    Ruled out when
        More than one in ten groups has different rewards.
    Confused with
        policy-does-not-move (advantages are not 0, the gradient is); broken-reward (rewards are
        missing or wrong); broken-sampler (completions are equal, and so are their rewards).
    """
    last = case.window[-STEPS:]
    if len(last) < STEPS:
        return no_data(f"{len(last)} steps, {STEPS} needed")
    shares = [case.of(share_equal, record) for record in last]
    if any(share is None for share in shares):
        return no_data("no rewards, or groups of size 1")
    least = min(share for share in shares if share is not None)
    rewards = np.concatenate([r.reward for r in last if r.reward is not None])
    summary = (
        f"{least:.0%} or more of the groups had equal rewards in {STEPS} steps (limit "
        f"{SHARE:.0%}); the mean reward is {np.nanmean(rewards):.3g}"
    )
    return (failed if least > SHARE else passed)(summary, share=least)


def share_equal(record: StepRecord) -> float | None:
    """Return the fraction of groups with equal rewards; None if no group can be compared."""
    if record.reward is None:
        return None
    compared = [rewards for rewards in known_rewards(record) if len(rewards) > 1]
    equal = sum(bool((g == g[0]).all()) for g in compared)
    return equal / len(compared) if compared else None


CHECK = Check(
    name="equal-rewards",
    stage=Stage.ADVANTAGE,
    needs=("record.reward",),
    fix="Use easier or harder prompts, larger groups or graduated rewards, or resample other "
    "prompts (loop.extra_rounds); check the verifier on correct answers.",
    judge=judge,
    change={"loop.extra_rounds": 2},
    explains=("cliff-rewards",),
)
