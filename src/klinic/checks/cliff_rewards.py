"""cliff-rewards: almost all completions get the lowest reward, with nothing in between."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed

FLOOR = 0.95  # fraction of completions at the lowest reward
STEPS = 3


def judge(case: Case) -> Finding:
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
    last = [record.reward for record in case.window[-STEPS:] if record.reward is not None]
    if len(last) < STEPS:
        return no_data(f"{len(last)} steps with rewards, {STEPS} needed")
    rewards = np.concatenate(last)
    rewards = rewards[np.isfinite(rewards)]
    values = np.unique(rewards)
    share = float((rewards == values[0]).mean()) if values.size else 0.0
    summary = (
        f"{share:.0%} of the rewards are the lowest of {values.size} values, "
        f"{values[0] if values.size else 0:g} (limit {FLOOR:.0%} at the lower of 2, below 0)"
    )
    wrong = values.size == 2 and share > FLOOR and values[0] < 0
    return (failed if wrong else passed)(summary, share=share, values=float(values.size))


CHECK = Check(
    name="cliff-rewards",
    stage=Stage.ADVANTAGE,
    needs=("record.reward",),
    fix="Give partial credit (graduated rewards), and a smaller penalty for malformed output.",
    judge=judge,
)
