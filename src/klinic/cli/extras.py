"""Checks for optional dependencies."""

from importlib.util import find_spec

from klinic.errors import MissingExtraError


def require(extra: str, *modules: str) -> None:
    """Raise with the install command if a module of an extra is missing."""
    missing = [module for module in modules if is_missing(module)]
    if missing:
        raise MissingExtraError(
            f'this needs {", ".join(missing)}. Install it with: pip install "klinic[{extra}]"'
        )


def is_missing(module: str) -> bool:
    """Whether a module is not installed."""
    return find_spec(module) is None
