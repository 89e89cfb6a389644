"""The process group of a learner: one process, or several that split the micro-batches."""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class ProcessGroup(Protocol):
    """The ranks of a learner, seen from one of them. All ranks make the same calls."""

    rank: int
    size: int

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the all-reduced sum."""

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Return the all-reduced maximum."""


class SingleProcess:
    """A group of one process."""

    rank = 0
    size = 1

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the values unchanged."""
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Return the values unchanged."""
        return values


SINGLE_PROCESS = SingleProcess()
