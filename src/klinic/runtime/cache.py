"""Cache folders for artifacts that klinic can rebuild: warm starts, games of a chess engine."""

import os
from pathlib import Path

from klinic.errors import ConfigError


def cache_folder(name: str) -> Path:
    """Create and return the cache folder of one kind of artifact."""
    folder = _cache_root() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache folder {folder} cannot be created: {error.strerror}. Set KLINIC_CACHE to a "
            "writable folder."
        ) from error
    return folder


def _cache_root() -> Path:
    if "KLINIC_CACHE" in os.environ:
        return Path(os.environ["KLINIC_CACHE"])
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "klinic"
