"""Which versions of TRL are known to work: its inner methods are wrapped, and they move."""

import re
from importlib.util import find_spec

from klinic.errors import ConfigError, MissingExtraError

OLDEST, NEWEST = (1, 14), (1, 16)


def require_trl() -> None:
    """Refuse a TRL that is missing, or that klinic was not tried with."""
    if find_spec("trl") is None:
        raise MissingExtraError('this needs trl. Install it with: pip install "klinic[trl]"')
    import trl

    refuse_untried(str(trl.__version__))


def refuse_untried(version: str) -> None:
    """Refuse a version outside of the tried ones.

    >>> refuse_untried("1.15.0")
    >>> refuse_untried("1.16.0.dev0")
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not OLDEST <= found <= NEWEST:
        tried = " to ".join(".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        raise ConfigError(
            f"TRL is {version}, and klinic.attach wraps inner methods that it was tried with in "
            f"TRL {tried} only: it could record something else than what is trained on. Install "
            'one of them: pip install "klinic[trl]".'
        )
