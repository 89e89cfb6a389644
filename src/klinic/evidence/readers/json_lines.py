"""Reads logs with one JSON object per line and the metric names of any known trainer.

The step is `step` or a name in `STEP_NAMES`; verl nests the metrics in `data`. Lines of the same
step are merged.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klinic.errors import EvidenceError
from klinic.evidence.files import LONGEST, Journal
from klinic.evidence.readers.log import LogBuilder, ScalarLog
from klinic.evidence.readers.trainer_state import is_training_entry

STEP_NAMES = (
    "train/global_step",  # before `_step`, which counts calls of wandb.log
    "training/global_step",
    "trainer/global_step",
    "training_step",  # before `global_step`, which counts completions in open-instruct
    "train/step",
    "rollout/step",
    "global_step",
    "step",
    "progress/batch",
    "iteration",
    "iter",
    "update",
    "_step",
)
NESTED = "data"


def read_log(path: Path) -> ScalarLog:
    """Return a log of JSON lines."""
    builder = LogBuilder()
    for entry in Journal(path).entries():
        add_entry(builder, entry)
    return builder.build_log(format="JSON lines", files=(path,))


def add_entry(builder: LogBuilder, entry: dict[str, Any]) -> None:
    """Add a line to the log if it is a training entry."""
    nested = entry.get(NESTED)
    values = {**nested, "step": entry.get("step")} if isinstance(nested, dict) else entry
    if is_training_entry(values):
        builder.add(find_step(values), values)


def find_step(values: Mapping[str, Any]) -> Any:
    """Return the step of an entry under the first name in `STEP_NAMES`, or None."""
    return next((values[name] for name in STEP_NAMES if name in values), None)


def first_entry(path: Path, *, longest: int = LONGEST) -> dict[str, Any]:
    """Return the first entry; an empty dict if the file has none."""
    try:
        return next(Journal(path, longest=longest).entries(), {})
    except EvidenceError:
        return {}
