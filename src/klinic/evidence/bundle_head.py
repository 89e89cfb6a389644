"""What a bundle begins with: told without NumPy, so that a scalar log is judged without it."""

from pathlib import Path

from klinic.evidence.files import open_file
from klinic.evidence.stored_zip import starts_with_member

HEAD = "bundle.json"


def is_bundle(path: Path) -> bool:
    """Whether a path is a file that starts like a bundle."""
    if not path.is_file():
        return False
    with open_file(path) as file:
        return starts_with_member(file.read(64), HEAD)
