"""Imports a function named in a recipe or command: `module:function` or `file.py:function`.

The name after the colon may have dots: `module:Class.method`.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from klinic.errors import FunctionError, KlinicError, error_text
from klinic.runtime.user_code import guard_process


def find_function(target: str, *, example: str) -> Callable[..., Any]:
    """Return the function named by `module:function` or `path/to/file.py:function`."""
    module_name, _, name = target.rpartition(":")
    if not module_name or not name:
        raise FunctionError(
            f"{target!r} is not a function name. Write module:function or "
            f"path/to/file.py:function, for example {example}."
        )
    module = _load_module(module_name)
    function = _find_attribute(module, name, target)
    if not callable(function):
        function_names = [n for n, f in vars(module).items() if inspect.isfunction(f)]
        raise FunctionError(
            f"{module_name} has no function {name!r}. "
            + (
                f"It has: {', '.join(sorted(function_names))}."
                if function_names
                else "It defines no functions."
            )
        )
    result: Callable[..., Any] = function
    return result


def _find_attribute(module: ModuleType, dotted_name: str, target: str) -> object:
    """Return the attribute, or None; a method that needs an instance is bound to a new one."""
    owner: object = module
    attribute: object = module
    for name in dotted_name.split("."):
        owner, attribute = attribute, getattr(attribute, name, None)
    last_name = dotted_name.rpartition(".")[2]
    if inspect.isclass(owner) and inspect.isfunction(
        inspect.getattr_static(owner, last_name, None)
    ):
        return getattr(make_instance(owner, target), last_name)
    return attribute


def make_instance(owner: type, target: str) -> object:
    """Return an instance of a class that needs no arguments."""
    try:
        with guard_process(target):
            return owner()
    except (KeyboardInterrupt, KlinicError):
        raise
    except BaseException as error:  # a constructor is user code
        raise FunctionError(
            f"{target}: {owner.__name__}() failed: {type(error).__name__}: {error_text(error)}. "
            "A method is called on an instance made without arguments; if the class needs some, "
            "name an instance (module:instance.method) or a function that makes one."
        ) from error


def _load_module(module_name: str) -> ModuleType:
    if module_name.endswith(".py") and not Path(module_name).is_file():
        raise FunctionError(f"{module_name} is not a file. Give its path relative to {Path.cwd()}.")
    try:
        with guard_process(module_name):
            return _import_module(module_name)
    except (KeyboardInterrupt, KlinicError):
        raise
    except BaseException as error:  # importing runs user code
        raise FunctionError(
            f"{module_name} cannot be imported: {type(error).__name__}: "
            f"{error_text(error)}. Run the "
            "command where `python -c 'import ...'` works, or give the path of the file."
        ) from error


def _import_module(module_name: str) -> ModuleType:
    if module_name.endswith(".py"):
        return _import_file(Path(module_name))
    # a console script does not have the working directory on sys.path, `python -c` does
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(module_name)


def _import_file(path: Path) -> ModuleType:
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
