"""Faults: one defect injected into a real run for the duration of a context.

A fault never writes evidence: it changes the behaviour of the run, which records it as usual. To
add one: a file with `FAULT`, listed in `faults/__init__.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import Parameter, signature
from typing import Any


class Severity(StrEnum):
    """Strength of a fault."""

    MILD = "mild"
    NORMAL = "normal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One mechanism of one cause."""

    cause: str
    """The name of a check."""
    mechanism: str
    """The defect, in a few words."""
    inject: Callable[[Severity], AbstractContextManager[None]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Recipe keys that the fault needs to be visible."""
    visible_at_start: bool = False
    """Whether it is visible before the first update."""


@contextmanager
def patch_attribute(owner: Any, name: str, change: Callable[..., Any]) -> Iterator[None]:
    """Replace an attribute of a module or class by `change(real, *args, **kwargs)`."""
    real = getattr(owner, name)
    _check_signature(real, change)

    def call_change(*args: Any, **kwargs: Any) -> Any:
        return change(real, *args, **kwargs)

    setattr(owner, name, call_change)
    try:
        yield
    finally:
        setattr(owner, name, real)


def _check_signature(real: Callable[..., Any], change: Callable[..., Any]) -> None:
    """Raise if `change` cannot be called with the arguments of the function it replaces."""
    parameters = signature(real).parameters.values()
    first = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    needed = [None for p in parameters if p.kind in first and p.default is Parameter.empty]
    by_name = {p.name: None for p in parameters if p.kind is Parameter.KEYWORD_ONLY}
    signature(change).bind(real, *needed, **by_name)
