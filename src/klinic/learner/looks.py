"""Which steps look at what costs a second pass or a copy.

That is the KL's own gradient, how far the weights move and, for a reference that moves, the KL to
the start. Early on, every tenth step; a long run should not pay a twentieth of its time for it.
"""

OFTEN, RARELY = 10, 50  # steps from one look to the next
EARLY = 100  # steps


def looks(step: int) -> bool:
    """Whether a step looks.

    >>> [step for step in range(1, 220) if looks(step)]
    [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 101, 151, 201]
    """
    return step % (OFTEN if step <= EARLY else RARELY) == 1


def share_of_looks(steps: int) -> float:
    """Return how many of so many steps look, as a share.

    >>> share_of_looks(10), share_of_looks(100), share_of_looks(10_000)
    (0.1, 0.1, 0.0208)
    """
    early, late = min(steps, EARLY), max(steps, EARLY)
    num = -(-early // OFTEN) + (late - 1) // RARELY - (EARLY - 1) // RARELY
    return num / steps
