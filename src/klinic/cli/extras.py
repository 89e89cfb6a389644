"""What a command says when the part of klinic that it needs is not installed."""

from importlib.util import find_spec

from klinic.errors import MissingExtraError


def require(extra: str, *modules: str) -> None:
    """Refuse, with the line to install it, when a module of an extra is missing."""
    missing = [module for module in modules if is_missing(module)]
    if missing:
        raise MissingExtraError(
            f'this needs {", ".join(missing)}. Install it with: pip install "klinic[{extra}]"'
        )


def is_missing(module: str) -> bool:
    """Whether a module is not installed."""
    return find_spec(module) is None
