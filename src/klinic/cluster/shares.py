"""Work that is cut into shares and done by a crew, whoever of it is lost on the way."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from klinic.cluster.crew import Crew, Member, MemberLostError


def shared(
    crew: Crew, name: str, shares: Sequence[Any], *more: Any, able: Callable[[], list[Member]]
) -> list[Any]:
    """Return what comes of every share; that of a member who is lost goes to another.

    `able` says who can be asked, and sees to it that somebody can.
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
    """Yield neighbouring items in as many shares, none empty and all nearly equal.

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
