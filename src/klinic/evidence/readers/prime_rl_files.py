"""Paths of prime-rl's token export: token_exports/step_N/rank_R.jsonl."""

import re
from pathlib import Path

from klinic.evidence.readers.trainer_state import children

FOLDER = "token_exports"
STEP = re.compile(r"step_([0-9]{1,15})")
RANK = re.compile(r"rank_([0-9]{1,9})\.jsonl")


def find(path: Path) -> Path | None:
    """Return the folder of the steps: the path or a `token_exports` folder in it, or None."""
    for folder in (path, path / FOLDER, path / "trainer" / FOLDER):
        if steps(folder):
            return folder
    return None


def steps(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of the steps that have files, in order."""
    found = [(int(m[1]), p) for p in children(folder) if (m := STEP.fullmatch(p.name))]
    return sorted((step, path) for step, path in found if ranks(path))


def ranks(folder: Path) -> list[Path]:
    """Return the files of a step, ordered by rank."""
    found = [(int(m[1]), p) for p in children(folder) if (m := RANK.fullmatch(p.name))]
    return [path for _, path in sorted(found)]
