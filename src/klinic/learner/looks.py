"""Schedule of the expensive diagnostics, which need a second pass or a copy of the weights.

These are the KL gradient fraction, the update norm and, for a moving reference, the KL to the
start: every 10 steps early on, then every 50, so that a long run does not spend a twentieth of its
time on them.
"""

OFTEN, RARELY = 10, 50  # steps between diagnostics
EARLY = 100  # steps


def looks(step: int) -> bool:
    """Whether a step runs the expensive diagnostics.

    >>> [step for step in range(1, 220) if looks(step)]
    [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 101, 151, 201]
    """
    return step % (OFTEN if step <= EARLY else RARELY) == 1


def share_of_looks(steps: int) -> float:
    """Return the fraction of `steps` steps that are diagnostic.

    >>> share_of_looks(10), share_of_looks(100), share_of_looks(10_000)
    (0.1, 0.1, 0.0208)
    """
    early, late = min(steps, EARLY), max(steps, EARLY)
    num = -(-early // OFTEN) + (late - 1) // RARELY - (EARLY - 1) // RARELY
    return num / steps
