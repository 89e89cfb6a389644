"""trainer_state.json, which transformers' Trainer and so TRL's write beside every checkpoint.

`log_history` is a list of entries. Those of training have `loss`; one with `eval_` names is of an
evaluation, one with `train_runtime` sums up the run. An entry is the mean over `logging_steps`.
"""

import re
from pathlib import Path
from typing import Any

from klinic.errors import EvidenceError
from klinic.evidence.files import read_json
from klinic.evidence.readers.log import Gathered, ScalarLog
from klinic.evidence.readers.names import trl_or_unrecognised

NAME = "trainer_state.json"
CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,15})")
SUMMARY = "train_runtime"
LARGEST = 3 << 28  # bytes: a million logged steps, each an object


def find(folder: Path) -> Path | None:
    """Return the state of the folder itself, or that of its last checkpoint."""
    if (folder / NAME).is_file():
        return folder / NAME
    found = [(int(m[1]), p) for p in children(folder) if (m := CHECKPOINT.fullmatch(p.name))]
    states = [path / NAME for _, path in sorted(found) if (path / NAME).is_file()]
    return states[-1] if states else None


def children(folder: Path) -> list[Path]:
    """Return what is in a folder, by name; nothing where it cannot be looked into."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def read(path: Path) -> ScalarLog:
    """Return the entries of training."""
    history = read_json(path, largest=LARGEST, most_containers=LARGEST).get("log_history")
    if not isinstance(history, list):
        raise EvidenceError(
            f"{path}: has no list `log_history`, so it is no {NAME} of transformers. Give the file "
            "that the Trainer saved, or the folder of its checkpoints."
        )
    gathered = Gathered()
    for number, entry in enumerate(history, 1):
        if not isinstance(entry, dict):
            raise EvidenceError(
                f"{path}: entry {number} of `log_history` is no object. The file was damaged; take "
                "that of another checkpoint."
            )
        if of_training(entry):
            gathered.add(entry.get("step"), entry)
    return gathered.log(format=NAME, files=(path,), recognise=trl_or_unrecognised)


def of_training(entry: dict[str, Any]) -> bool:
    """Whether an entry is of training: neither of an evaluation nor the summary at the end."""
    if SUMMARY in entry:
        return False
    return "loss" in entry or not any(name.startswith("eval_") for name in entry)
