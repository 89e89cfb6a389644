"""Fraction of a run's time that failures and checkpoints leave for new steps.

Writing a checkpoint takes c seconds of every interval T. A failure, every M seconds on average,
costs R seconds until the run continues, plus half an interval of repeated steps if the run resumes
from a checkpoint:

    goodput = 1 - c / T - (R + T / 2) / M          best at T = sqrt(2 c M)

First order in c / T and T / M, as in J. W. Young, "A first order approximation to the optimum
checkpoint interval" (1974).
"""

import math


def goodput_fraction(
    *,
    checkpoint: float,
    interval: float,
    recovery: float,
    between_failures: float,
    resumes: bool = True,
) -> float:
    """Return the fraction of time spent on new steps; all times in seconds.

    >>> fraction = goodput_fraction(
    ...     checkpoint=1.0, interval=100.0, recovery=50.0, between_failures=1e4
    ... )
    >>> round(fraction, 3)
    0.98
    """
    repeated = interval / 2 if resumes else 0.0
    lost = checkpoint / interval + (recovery + repeated) / between_failures
    return max(0.0, 1 - lost)


def best_checkpoint_interval(*, checkpoint: float, between_failures: float) -> float:
    """Return the checkpoint interval in seconds that loses the least time.

    >>> best_checkpoint_interval(checkpoint=2.0, between_failures=1e4)
    200.0
    """
    return math.sqrt(2 * checkpoint * between_failures)
