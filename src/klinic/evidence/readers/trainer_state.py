"""Reads trainer_state.json, which the Trainer of transformers and TRL saves in every checkpoint.

`log_history` is a list of entries. Training entries have `loss`, evaluations have `eval_` names,
and the summary of the run has `train_runtime`. An entry is the mean over `logging_steps`.
"""

import re
from pathlib import Path
from typing import Any

from klinic.errors import EvidenceError
from klinic.evidence.files import read_json
from klinic.evidence.readers.log import LogBuilder, ScalarLog
from klinic.evidence.readers.recognise import trl_or_unrecognised

NAME = "trainer_state.json"
CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,15})")
SUMMARY = "train_runtime"
LARGEST = 3 << 28  # bytes: a million logged steps


def find_state_file(folder: Path) -> Path | None:
    """Return the state file of the folder or of its last checkpoint, or None."""
    if (folder / NAME).is_file():
        return folder / NAME
    checkpoints = [
        (int(m[1]), p) for p in list_folder(folder) if (m := CHECKPOINT.fullmatch(p.name))
    ]
    states = [path / NAME for _, path in sorted(checkpoints) if (path / NAME).is_file()]
    return states[-1] if states else None


def list_folder(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted; an empty list if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def read_log(path: Path) -> ScalarLog:
    """Return the training entries as a scalar log."""
    return build_log(read_json(path, largest=LARGEST, most_containers=LARGEST), path)


def build_log(state: dict[str, Any], path: Path) -> ScalarLog:
    """Return the training entries of a state as a scalar log."""
    history = state.get("log_history")
    if not isinstance(history, list):
        raise EvidenceError(
            f"{path}: has no list `log_history`, so it is no {NAME} of transformers. Pass the file "
            "that the Trainer saved, or the folder of its checkpoints."
        )
    builder = LogBuilder()
    for number, entry in enumerate(history, 1):
        if not isinstance(entry, dict):
            raise EvidenceError(
                f"{path}: entry {number} of `log_history` is not an object. The file was damaged; "
                "use that of another checkpoint."
            )
        if is_training_entry(entry):
            builder.add(entry.get("step"), entry)
    return builder.build_log(format=NAME, files=(path,), recognise=trl_or_unrecognised)


def is_training_entry(entry: dict[str, Any]) -> bool:
    """Whether an entry is of training, neither an evaluation nor the final summary."""
    if SUMMARY in entry:
        return False
    return "loss" in entry or not any(name.startswith("eval_") for name in entry)
