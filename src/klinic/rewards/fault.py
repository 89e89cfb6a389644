"""The error of a reward function, with the index of the failing completion."""

import traceback
from pathlib import Path

from klinic.errors import RewardError, text_of

ADVICE = "Return one number per completion, in order, and None for one that cannot be judged."


LONGEST_TEXT = 500  # characters of an error message: some quote their whole input


class Fault(RewardError):  # noqa: N818 - the runner turns it into a RewardError with the reward's name
    """A reward function failed; `what` continues its name: "raised KeyError: 'gold'"."""

    def __init__(self, what: str, index: int | None = None, advice: str = ADVICE) -> None:
        super().__init__(what, index, advice)
        self.what = what
        self.index = index
        """Index of the completion in the call; None if no single completion causes the fault."""
        self.advice = advice

    def __str__(self) -> str:
        place = "" if self.index is None else f", first at completion {self.index}"
        return f"the reward function {self.what}{place}. {self.advice}"


def at(fault: Fault, index: int) -> Fault:
    """Return a copy of the fault with the index of its completion."""
    placed = Fault(fault.what, index, fault.advice)
    placed.__cause__ = fault.__cause__
    return placed


def described(error: BaseException) -> str:
    """Format an error on one line: type, message, file and line.

    >>> described(KeyError("gold"))
    "KeyError: 'gold'"
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = text_of(error)
    shown = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."
    return f"{type(error).__name__}: {shown}".removesuffix(": ") + where
