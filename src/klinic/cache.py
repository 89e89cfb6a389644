"""Where klinic keeps what it can make again: warm starts, games of an engine."""

import os
from pathlib import Path

from klinic.errors import ConfigError


def cache_folder(name: str) -> Path:
    """Return the folder for one kind of thing, made before hours of work depend on it."""
    folder = _root() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache {folder} cannot be made: {error.strerror}. Set KLINIC_CACHE to a folder "
            "that can be written."
        ) from error
    return folder


def _root() -> Path:
    if "KLINIC_CACHE" in os.environ:
        return Path(os.environ["KLINIC_CACHE"])
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "klinic"
