"""Imports a function named in a recipe or command: `module:function` or `file.py:function`."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from klinic.errors import FunctionError, KlinicError, text_of
from klinic.user_code import guard


def find_function(target: str, *, example: str) -> Callable[..., Any]:
    """Return the function named by `module:function` or `path/to/file.py:function`."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise FunctionError(
            f"{target!r} is not a function name. Write module:function or "
            f"path/to/file.py:function, for example {example}."
        )
    module = _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, f in vars(module).items() if inspect.isfunction(f)]
        raise FunctionError(
            f"{place} has no function {name!r}. "
            + (f"It has: {', '.join(sorted(known))}." if known else "It defines no functions.")
        )
    found: Callable[..., Any] = function
    return found


def _module(place: str) -> ModuleType:
    if place.endswith(".py") and not Path(place).is_file():
        raise FunctionError(f"{place} is not a file. Give its path relative to {Path.cwd()}.")
    try:
        with guard(place):
            return _imported(place)
    except (KeyboardInterrupt, KlinicError):
        raise
    except BaseException as error:  # importing runs user code
        raise FunctionError(
            f"{place} cannot be imported: {type(error).__name__}: {text_of(error)}. Run the "
            "command where `python -c 'import ...'` works, or give the path of the file."
        ) from error


def _imported(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _from_file(Path(place))
    # a console script does not have the working directory on sys.path, `python -c` does
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(place)


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # as `python file.py` does: sibling modules are importable, klinic's arguments are hidden
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules.setdefault(path.stem, module)  # dataclasses look up their module
    arguments, sys.argv = sys.argv, [str(path)]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = arguments
    return module
