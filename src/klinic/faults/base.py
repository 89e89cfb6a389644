"""What an injected fault is: one thing in a real run made wrong, for as long as a context lasts.

A fault never writes evidence: it changes what the run does, and the run records it as it would any
other. To add one: a file with `FAULT`, and its name in `faults/__init__.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import Parameter, signature
from typing import Any


class Severity(StrEnum):
    """How strongly a fault is at work."""

    MILD = "mild"
    NORMAL = "normal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One mechanism of one cause."""

    cause: str
    """A name of `evidence.causes`."""
    mechanism: str
    """What is done, in a few words."""
    inject: Callable[[Severity], AbstractContextManager[None]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the recipe without which it could not show."""
    visible_at_start: bool = False
    """Whether it can be seen before the first update."""


@contextmanager
def patched(owner: Any, name: str, change: Callable[..., Any]) -> Iterator[None]:
    """Let `change(real, *args, **kwargs)` stand for an attribute of a module or class."""
    real = getattr(owner, name)
    _refuse_others(real, change)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return change(real, *args, **kwargs)

    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, real)


def _refuse_others(real: Callable[..., Any], change: Callable[..., Any]) -> None:
    """Refuse a change that could not be called as what it stands for is."""
    given = signature(real).parameters.values()
    first = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    needed = [None for p in given if p.kind in first and p.default is Parameter.empty]
    by_name = {p.name: None for p in given if p.kind is Parameter.KEYWORD_ONLY}
    signature(change).bind(real, *needed, **by_name)
