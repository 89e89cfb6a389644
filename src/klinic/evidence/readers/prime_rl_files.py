"""Paths of prime-rl's token export: token_exports/step_N/rank_R.jsonl."""

import re
from pathlib import Path

from klinic.evidence.readers.trainer_state import list_folder

FOLDER = "token_exports"
STEP = re.compile(r"step_([0-9]{1,15})")
RANK = re.compile(r"rank_([0-9]{1,9})\.jsonl")


def find_exports(path: Path) -> Path | None:
    """Return the folder of the steps: the path or a `token_exports` folder in it, or None."""
    for folder in (path, path / FOLDER, path / "trainer" / FOLDER):
        if step_folders(folder):
            return folder
    return None


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of the steps that have files, in order."""
    matches = [(int(m[1]), p) for p in list_folder(folder) if (m := STEP.fullmatch(p.name))]
    return sorted((step, path) for step, path in matches if rank_files(path))


def rank_files(folder: Path) -> list[Path]:
    """Return the files of a step, ordered by rank."""
    matches = [(int(m[1]), p) for p in list_folder(folder) if (m := RANK.fullmatch(p.name))]
    return [path for _, path in sorted(matches)]
