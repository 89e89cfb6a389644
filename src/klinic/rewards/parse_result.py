"""Validates the values that a reward function returned; errors have the completion's index."""

import math
import traceback
from collections.abc import Iterable, Mapping, Set, Sized
from itertools import islice
from numbers import Real
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from klinic.errors import RewardError, error_text

ADVICE = "Return one number per completion, in order, and None for one that cannot be judged."


MAX_ERROR_LENGTH = 500  # characters of an error message: some quote their whole input


class RewardFault(RewardError):  # noqa: N818 - the runner turns it into a RewardError with the reward's name
    """A reward function failed; `what` continues its name: "raised KeyError: 'gold'"."""

    def __init__(self, what: str, index: int | None = None, advice: str = ADVICE) -> None:
        super().__init__(what, index, advice)
        self.what = what
        self.index = index
        """Index of the completion in the call; None if no single completion causes the fault."""
        self.advice = advice

    def __str__(self) -> str:
        location = "" if self.index is None else f", first at completion {self.index}"
        return f"the reward function {self.what}{location}. {self.advice}"


def fault_at(fault: RewardFault, index: int) -> RewardFault:
    """Return a copy of the fault with the index of its completion."""
    located = RewardFault(fault.what, index, fault.advice)
    located.__cause__ = fault.__cause__
    return located


def describe_error(error: BaseException) -> str:
    """Format an error on one line: type, message, file and line.

    >>> describe_error(KeyError("gold"))
    "KeyError: 'gold'"
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = error_text(error)
    shown = text if len(text) <= MAX_ERROR_LENGTH else f"{text[:MAX_ERROR_LENGTH]}..."
    return f"{type(error).__name__}: {shown}".removesuffix(": ") + where


UNORDERED = (Mapping, Set)
TEXT = (str, bytes, bytearray)


class RewardValues(list[float | None]):
    """One number or None per completion, and counts of lost ones by reason (`timeouts`)."""

    def __init__(self, values: Iterable[float | None] = (), **lost: int) -> None:
        super().__init__(values)
        self.lost = lost
        """Number of completions without a value, by reason."""


def parse_result(result: Any, num: int) -> RewardValues:
    """Convert a function's result to `num` numbers or Nones; raise a fault otherwise.

    A generator runs user code here.

    >>> parse_result([True, 0.5, None], 3)
    [1.0, 0.5, None]
    """
    if isinstance(result, (*TEXT, *UNORDERED)) or not isinstance(result, Iterable):
        raise RewardFault(
            f"returned {_quote_value(result)}, not a list with one number or None per completion"
        )
    values = list(islice(result, num + 1))  # a generator may be infinite
    if len(values) != num:
        num_returned = f"{len(values)}" if len(values) < num else _describe_length(result)
        noun = "value" if num_returned == "1" else "values"
        completions = "1 completion" if num == 1 else f"{num} completions"
        raise RewardFault(
            f"returned {num_returned} {noun} for {completions}, so they cannot be matched"
        )
    numbers = (None if v is None else _parse_number(v, index) for index, v in enumerate(values))
    return RewardValues(numbers, **(result.lost if isinstance(result, RewardValues) else {}))


def _parse_number(value: Any, index: int) -> float:
    """Convert a Python, NumPy or torch number to a float."""
    try:
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, Real):
            return float(plain)
    except OverflowError:  # an integer above the largest float
        return math.inf
    except (ValueError, RuntimeError, TypeError):
        pass  # an array with several elements
    raise RewardFault(f"returned {_quote_value(value)}, which is neither a number nor None", index)


def _describe_length(result: Any) -> str:
    return str(len(result)) if isinstance(result, Sized) else "more"


def _quote_value(value: Any) -> str:
    try:
        text = brief(value)
    except Exception:  # user code; an integer with too many digits
        text = "a value without a text"
    return f"{text} ({type(value).__name__})"
