"""Supported versions of TRL: klinic wraps private methods, which change between versions."""

import re
from importlib.util import find_spec

from klinic.errors import ConfigError, MissingExtraError

OLDEST, NEWEST = (1, 14), (1, 16)


def require_trl() -> None:
    """Raise if TRL is missing or its version is untested."""
    if find_spec("trl") is None:
        raise MissingExtraError('this needs trl. Install it with: pip install "klinic[trl]"')
    import trl

    refuse_untried(str(trl.__version__))


def refuse_untried(version: str) -> None:
    """Raise ConfigError for a version outside the tested range.

    >>> refuse_untried("1.15.0")
    >>> refuse_untried("1.16.0.dev0")
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not OLDEST <= found <= NEWEST:
        tried = " to ".join(".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        raise ConfigError(
            f"TRL is {version}, but klinic.attach wraps private methods and is tested with TRL "
            f"{tried} only: its records could differ from the data that TRL trains on. Install a "
            'tested version: pip install "klinic[trl]".'
        )
