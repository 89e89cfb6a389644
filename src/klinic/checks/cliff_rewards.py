"""cliff-rewards: almost all completions get the lowest reward, with nothing in between."""

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
from klinic.checks.measures import trains_on_teacher_alone

MAX_LOWEST_FRACTION = 0.95  # fraction of completions at the lowest reward
NUM_STEPS = 3


def judge_case(case: Case) -> Finding:
    """Flag rewards that carry no information about how wrong an answer is.

    Looks for
        Rewards with two values only, over the last three steps, the lower one negative, and the
        fraction of the completions that get it.
    Why it matters
        Near misses and noise get the same reward. A rare success in a group of failures
        dominates the gradient of its step, and most steps have none.
    Confirmed when
        There are two values, the lower one below 0, and 95% of the completions get it.
    Ruled out when
        There are intermediate values, failing costs nothing, or success is not rare.
    Confused with
        equal-rewards (no group has a success at all); malformed-output (there is nothing to
        grade).
    """
    if trains_on_teacher_alone(case):
        return passed_finding("the loss has no rewards: the KL to a teacher replaces them")
    last = [
        record.reward for record in case.recent_records[-NUM_STEPS:] if record.reward is not None
    ]
    if len(last) < NUM_STEPS:
        return no_data_finding(f"{len(last)} steps with rewards, {NUM_STEPS} needed")
    rewards = np.concatenate(last)
    rewards = rewards[np.isfinite(rewards)]
    values = np.unique(rewards)
    lowest_fraction = float((rewards == values[0]).mean()) if values.size else 0.0
    summary = (
        f"{lowest_fraction:.0%} of the rewards are the lowest of {values.size} values, "
        f"{values[0] if values.size else 0:g} (limit "
        f"{MAX_LOWEST_FRACTION:.0%} at the lower of 2, below 0)"
    )
    wrong = values.size == 2 and lowest_fraction > MAX_LOWEST_FRACTION and values[0] < 0
    return (failed_finding if wrong else passed_finding)(
        summary, share=lowest_fraction, values=float(values.size)
    )


CHECK = Check(
    name="cliff-rewards",
    description="almost all completions get the lowest reward, with nothing in between",
    stage=Stage.ADVANTAGE,
    needs=("record.reward",),
    fix="Give partial credit (graduated rewards), and a smaller penalty for malformed output.",
    judge=judge_case,
    reads=("record.group",),
)
