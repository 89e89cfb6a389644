"""equal-rewards: groups of equal rewards carry no training signal."""

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
from klinic.checks.measures import finite_group_rewards
from klinic.evidence.record import StepRecord

MAX_EQUAL_FRACTION = 0.9  # fraction of groups; half is usual, and some runs resample such groups
NUM_STEPS = 3  # consecutive: a single step can be chance


def judge_case(case: Case) -> Finding:
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
    last = case.recent_records[-NUM_STEPS:]
    if len(last) < NUM_STEPS:
        return no_data_finding(f"{len(last)} steps, {NUM_STEPS} needed")
    fractions = [case.measure_once(equal_reward_fraction, record) for record in last]
    if any(fraction is None for fraction in fractions):
        return no_data_finding("no rewards, or groups of size 1")
    least = min(fraction for fraction in fractions if fraction is not None)
    rewards = np.concatenate([r.reward for r in last if r.reward is not None])
    summary = (
        f"{least:.0%} or more of the groups had equal rewards in {NUM_STEPS} steps (limit "
        f"{MAX_EQUAL_FRACTION:.0%}); the mean reward is {np.nanmean(rewards):.3g}"
    )
    return (failed_finding if least > MAX_EQUAL_FRACTION else passed_finding)(summary, share=least)


def equal_reward_fraction(record: StepRecord) -> float | None:
    """Return the fraction of groups with equal rewards; None if no group can be compared."""
    if record.reward is None:
        return None
    comparable_groups = [rewards for rewards in finite_group_rewards(record) if len(rewards) > 1]
    equal = sum(bool((g == g[0]).all()) for g in comparable_groups)
    return equal / len(comparable_groups) if comparable_groups else None


CHECK = Check(
    name="equal-rewards",
    description="groups of equal rewards carry no training signal",
    stage=Stage.ADVANTAGE,
    needs=("record.reward",),
    fix="Use easier or harder prompts, larger groups or graduated rewards, or resample other "
    "prompts (loop.extra_rounds); check the verifier on correct answers.",
    judge=judge_case,
    change={"loop.extra_rounds": 2},
    explains=("cliff-rewards",),
    reads=(
        "record.advantage",
        "record.group",
        "facts.grad_norm",
    ),
)
