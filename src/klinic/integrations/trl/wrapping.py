"""Methods of an object in memory that are wrapped, and unwrapped without a trace."""

from collections.abc import Callable
from typing import Any


class Wrapped:
    """Attributes of objects that stand in for their own, until `undo`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, change: Callable[..., Any]) -> Any:
        """Let `change(real, *args, **kwargs)` stand for a method; return the real one."""
        real = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return change(real, *args, **kwargs)

        own = vars(owner)
        self._before.append((owner, name, own.get(name)))
        own[name] = wrapped
        return real

    def undo(self) -> None:
        """Put everything back, the last first."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
