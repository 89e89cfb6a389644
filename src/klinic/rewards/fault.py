"""What is wrong with a reward function, and at which completion."""

import traceback
from pathlib import Path

from klinic.errors import RewardError, text_of

ADVICE = "Return one number a completion, in their order, and None for one that cannot be judged."


LONGEST_TEXT = 500  # characters of an error: some quote all that they were given


class Fault(RewardError):  # noqa: N818 - it becomes an error once its reward is named
    """A reward function broke; `what` goes on from its name: "raised KeyError: 'gold'"."""

    def __init__(self, what: str, index: int | None = None, advice: str = ADVICE) -> None:
        super().__init__(what, index, advice)
        self.what = what
        self.index = index
        """The completion's place in the call, from 0; None where no single one is to blame."""
        self.advice = advice

    def __str__(self) -> str:
        place = "" if self.index is None else f", first at completion {self.index}"
        return f"the reward function {self.what}{place}. {self.advice}"


def at(fault: Fault, index: int) -> Fault:
    """Return the fault with the completion that it is about."""
    placed = Fault(fault.what, index, fault.advice)
    placed.__cause__ = fault.__cause__
    return placed


def described(error: BaseException) -> str:
    """Return an error in a line: its type, its text, and where it was raised.

    >>> described(KeyError("gold"))
    "KeyError: 'gold'"
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = text_of(error)
    shown = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."
    return f"{type(error).__name__}: {shown}".removesuffix(": ") + where
