"""Splits work into chunks and maps them over a worker pool; resubmits those of dead workers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from klinic.cluster.crew import Crew, Member, MemberLostError


def shared(
    crew: Crew, name: str, shares: Sequence[Any], *more: Any, able: Callable[[], list[Member]]
) -> list[Any]:
    """Return the result of every chunk; the chunk of a dead worker is resubmitted to another.

    `available` returns the workers that can take work, and waits until there is one.
    """
    done: dict[int, Any] = {}
    running: dict[Any, tuple[int, Member]] = {}
    while len(done) < len(shares):
        taken = {number for number, _ in running.values()} | done.keys()
        busy = [member for _, member in running.values()]
        open_ = [number for number in range(len(shares)) if number not in taken]
        idle = [member for member in able() if member not in busy] if open_ else []
        for number, member in zip(open_, idle, strict=False):
            running[crew.ask(member, name, shares[number], *more)] = number, member
        ref = crew.first(list(running))
        number, member = running.pop(ref)
        with suppress(MemberLostError):
            done[number] = crew.answer(member, ref)
    return [done[number] for number in range(len(shares))]


def split(items: Sequence[Any], num: int) -> Iterator[Sequence[Any]]:
    """Yield `num` contiguous chunks of nearly equal size, none empty.

    >>> list(split([1, 2, 3, 4, 5], 2)), list(split([1], 2))
    ([[1, 2, 3], [4, 5]], [[1]])
    """
    num = min(num, len(items))
    small, rest = divmod(len(items), num) if num else (0, 0)
    at = 0
    for share in range(num):
        size = small + (share < rest)
        yield items[at : at + size]
        at += size
