"""Wraps methods of live objects, and restores them."""

from collections.abc import Callable
from typing import Any


class Wrapped:
    """Wrapped methods of live objects, with the originals for `restore_methods`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, change: Callable[..., Any]) -> Any:
        """Replace a method by `change(real, *args, **kwargs)`; return the real one."""
        real = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return change(real, *args, **kwargs)

        own = vars(owner)
        self._before.append((owner, name, own.get(name)))
        own[name] = wrapped
        return real

    def undo(self) -> None:
        """Restore every wrapped method, the last first."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
