"""What failures leave of the time of a run.

Of every interval T between checkpoints, c seconds go to writing one. A failure, every M seconds on
average, costs R seconds until the run goes on, and half an interval of steps that are made again if
it goes on from a checkpoint:

    goodput = 1 - c / T - (R + T / 2) / M          best at T = sqrt(2 c M)

First order in c / T and T / M, as in J. W. Young, "A first order approximation to the optimum
checkpoint interval" (1974).
"""

import math


def goodput(
    *,
    checkpoint: float,
    interval: float,
    recovery: float,
    between_failures: float,
    resumes: bool = True,
) -> float:
    """Return the share of the time in which new steps are made; all times in seconds.

    >>> round(goodput(checkpoint=1.0, interval=100.0, recovery=50.0, between_failures=1e4), 3)
    0.98
    """
    again = interval / 2 if resumes else 0.0
    lost = checkpoint / interval + (recovery + again) / between_failures
    return max(0.0, 1 - lost)


def best_interval(*, checkpoint: float, between_failures: float) -> float:
    """Return the seconds between checkpoints at which least is lost.

    >>> best_interval(checkpoint=2.0, between_failures=1e4)
    200.0
    """
    return math.sqrt(2 * checkpoint * between_failures)
