"""Who shares the work of a step: one process, or several that each take some micro-batches."""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Team(Protocol):
    """The processes of a learner, as one of them sees it. All of them make the same calls."""

    rank: int
    size: int

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of what every process gives."""


class Alone:
    """A process that does everything itself."""

    rank = 0
    size = 1

    def sum(self, values: Tensor) -> Tensor:
        """Return the values: nobody else has any."""
        return values


ALONE = Alone()
