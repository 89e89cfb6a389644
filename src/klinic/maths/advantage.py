"""Advantages from the rewards of a group of completions.

Write r_i for the rewards of a group of n completions of one prompt, m for their mean and s for
their standard deviation (divided by n).

    name            advantage                 effective KL coefficient
    none            r_i                       as written
    group_mean      r_i - m                   times n / (n - 1): the policy term is (1 - 1/n) small
    leave_one_out   r_i - mean of the others  as written
    group_std       (r_i - m) / max(s, floor) about s of the group, times n / (n - 1)
    batch           (r_i - M) / max(S, floor) times S of the step: one number for all groups

The KL term enters the loss after this step, never the rewards before it: division by s would
multiply the coefficient by 1 / s, and in a group of equal rewards s consists of the KL alone: at a
coefficient of 0.001 and two KLs that differ by 2 nats, s is 0.001: a factor of 1000.

Sources: group_std, DeepSeekMath (2024), eq. 3; group_mean, Dr. GRPO (2025); leave_one_out, W. Kool
et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (2019); batch, J. Hu et al.,
"REINFORCE++" (2025).
"""

from typing import Any

from jaxtyping import Float, Int

from klinic.errors import ConfigError
from klinic.maths.arrays import dense_ids, segment_count, segment_max, segment_sum

STD_FLOOR = 1e-4  # the epsilon of GRPO trainers; as a floor it does not change a larger s

Rewards = Float[Any, "B"]
Groups = Int[Any, "B"]


def none(reward: Rewards, group: Groups) -> Rewards:  # noqa: ARG001 - one signature for all
    """Return the rewards unchanged.

    Formula: r_i.
    Symbols: r_i, the reward of completion i.
    Assumes: rewards are already centred, or a learned baseline is used elsewhere.
    Source: Williams (1992), REINFORCE.

    >>> import numpy as np
    >>> none(np.array([1.0, 0.0]), np.array([0, 0]))
    array([1., 0.])
    """
    return reward


def group_mean(reward: Rewards, group: Groups) -> Rewards:
    """Return the rewards less their group's mean.

    Formula: r_i - m.
    Symbols: m, the mean reward of the group, the member itself included.
    Assumes: members of a group share a prompt. The policy term comes out (1 - 1/n) small.
    Source: Dr. GRPO (2025).

    >>> import numpy as np
    >>> group_mean(np.array([1.0, 0.0, 5.0]), np.array([0, 0, 1]))
    array([ 0.5, -0.5,  0. ])
    """
    # subtract the group's maximum first: equal rewards then give exactly 0, not rounding noise
    _reject_half_precision(reward)
    group = dense_ids(group)
    below_max = reward - segment_max(reward, group, len(group))[group]
    return below_max - _group_mean(below_max, group)


def leave_one_out(reward: Rewards, group: Groups) -> Rewards:
    """Return the rewards less the mean of the other members: an unbiased baseline.

    Formula: r_i - sum over j != i of r_j / (n - 1).
    Symbols: n, the size of the group.
    Assumes: members of a group share a prompt. A group of one has advantage 0.
    Source: Kool et al. (2019).

    >>> import numpy as np
    >>> leave_one_out(np.array([1.0, 0.0, 5.0]), np.array([0, 0, 1]))
    array([ 1., -1.,  0.])
    """
    size = _group_size(dense_ids(group))
    return group_mean(reward, group) * size / (size - 1).clip(min=1)


def group_std(reward: Rewards, group: Groups, *, floor: float = STD_FLOOR) -> Rewards:
    """Return the rewards less their group's mean, divided by their group's standard deviation.

    Formula: (r_i - m) / max(s, floor).
    Symbols: m, s, mean and standard deviation of the group, both divided by n.
    Assumes: members of a group share a prompt. |advantage| is at most sqrt(n - 1). A group of
    equal rewards has advantage 0 for every floor.
    Source: DeepSeekMath (2024), eq. 3.

    >>> import numpy as np
    >>> group_std(np.array([3.0, 1.0, 5.0]), np.array([0, 0, 1]))
    array([ 1., -1.,  0.])
    """
    centred = group_mean(reward, group)
    return (
        centred / _group_mean(centred**2, dense_ids(group)).clip(min=_squared_floor(floor)) ** 0.5
    )


def batch(reward: Rewards, group: Groups, *, floor: float = STD_FLOOR) -> Rewards:  # noqa: ARG001
    """Return the rewards less the step's mean, divided by the step's standard deviation.

    Formula: (r_i - M) / max(S, floor).
    Symbols: M, S, mean and standard deviation over all completions of the step.
    Assumes: prompts of similar difficulty; otherwise the advantage ranks prompts, not completions.
    Source: REINFORCE++ (2025).

    >>> import numpy as np
    >>> batch(np.array([3.0, 1.0]), np.array([0, 1]))
    array([ 1., -1.])
    """
    _reject_half_precision(reward)
    below_max = reward - reward.max()
    centred = below_max - below_max.mean()
    return centred / (centred**2).mean().clip(min=_squared_floor(floor)) ** 0.5


ADVANTAGES = {f.__name__: f for f in (none, group_mean, leave_one_out, group_std, batch)}


def _group_size(group: Any) -> Any:
    return segment_count(group, len(group))[group]


def _group_mean(values: Any, group: Any) -> Any:
    return segment_sum(values, group, len(group))[group] / _group_size(group)


def _reject_half_precision(reward: Any) -> None:
    if "float16" in str(reward.dtype):
        raise ConfigError(
            f"rewards are {reward.dtype}: sums over a group stop growing at 256 (bfloat16) or 2048 "
            "(float16). Convert them to float32."
        )


def _squared_floor(floor: float) -> float:
    if not floor > 0:
        raise ConfigError(
            f"the floor of the standard deviation is {floor}: a group of equal rewards would "
            f"divide by zero. Use a positive floor ({STD_FLOOR} is the default)."
        )
    return floor**2
