"""The folder that `--out` names. Imports no torch."""

from pathlib import Path

from klinic.errors import ConfigError
from klinic.training.run_folder import is_unused_folder


def check_empty(out: Path) -> None:
    """Raise ConfigError if the folder is not empty: the demo overwrites nothing."""
    if out.exists() and not is_unused_folder(out):
        raise ConfigError(
            f"--out is {out}, which is not empty, and the demo overwrites nothing. Use a new "
            "folder, or omit --out: each demo then gets a folder of its own."
        )
