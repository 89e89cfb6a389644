"""Base class of recipe sections (frozen, strict), and field types whose bounds state a reason.

Strict: text is not converted to a number, true is not 1, and NaN and infinity are refused. Text
from a file or a command line is parsed as YAML before validation.
"""

import operator
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from klinic.recipe.secret import refuse_secret

MAX_COUNT = 10**9  # turns a mistyped digit into an error message instead of a crash
MAX_SEED = 2**63 - 1  # largest seed of a 64-bit random generator
MAX_TEXT_LENGTH = 4096  # longest path on Linux

Number = int | float


class Section(BaseModel):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


def within(
    why: str,
    *,
    low: Number | None = None,
    above: Number | None = None,
    high: Number | None = None,
    below: Number | None = None,
) -> AfterValidator:
    """Return a bounds validator whose message states the reason; `low` and `high` are inclusive."""
    bounds: tuple[tuple[Number | None, str, Callable[[Number, Number], bool]], ...] = (
        (low, "{} or more", operator.ge),
        (above, "more than {}", operator.gt),
        (high, "at most {}", operator.le),
        (below, "less than {}", operator.lt),
    )
    active_bounds = [
        (bound, text.format(bound), holds) for bound, text, holds in bounds if bound is not None
    ]

    def check(value: Number) -> Number:
        if not all(holds(value, bound) for bound, _, holds in active_bounds):
            raise ValueError(f"{why}. Use {' and '.join(text for _, text, _ in active_bounds)}")
        return value

    return AfterValidator(check)


def _check_text(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty. Set a value, or remove the key")
    if not value.isprintable() or len(value) > MAX_TEXT_LENGTH:
        raise ValueError(f"use at most {MAX_TEXT_LENGTH} printable characters, on one line")
    return refuse_secret(value)


Text = Annotated[str, AfterValidator(_check_text)]
Count = Annotated[int, within("it is a count", low=1, high=MAX_COUNT)]
CountOrZero = Annotated[int, within("it is a count", low=0, high=MAX_COUNT)]
Seed = Annotated[int, within("it seeds random generators", low=0, high=MAX_SEED)]
