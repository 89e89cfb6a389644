"""Reads a JSON file of metrics: a list with one object per step, or an object of equal lists.

[{"step": 1, "kl": 0.0}, {"step": 2, "kl": 0.1}]     json.dump(trainer.state.log_history)
{"step": [1, 2], "kl": [0.0, 0.1]}                   a table by column
{"log_history": [...]}                               trainer_state.json
"""

from pathlib import Path
from typing import Any

from klinic.errors import EvidenceError
from klinic.evidence.files import parse_json, read_bytes
from klinic.evidence.readers import trainer_state
from klinic.evidence.readers.json_lines import add_entry
from klinic.evidence.readers.log import LogBuilder, ScalarLog

HISTORY = "log_history"


def read_log(path: Path) -> ScalarLog:
    """Return the metrics of a JSON file."""
    data = read_bytes(path, largest=trainer_state.LARGEST)
    try:
        value = parse_json(data, most_containers=trainer_state.LARGEST)
    except ValueError as error:
        raise EvidenceError(
            f"{path}: is not JSON ({error}). It was cut short or edited; restore it from a copy."
        ) from error
    if isinstance(value, dict) and not _is_columns(value):
        return trainer_state.build_log(value, path)
    builder = LogBuilder()
    for entry in _rows_of_columns(value) if isinstance(value, dict) else _checked(value, path):
        add_entry(builder, entry)
    return builder.build_log(format="JSON", files=(path,))


def _is_columns(value: dict[str, Any]) -> bool:
    """Whether an object holds a table by column: two lists or more, all of one length."""
    lengths = {len(v) if isinstance(v, list) else -1 for v in value.values()}
    return HISTORY not in value and len(value) > 1 and len(lengths) == 1 and -1 not in lengths


def _rows_of_columns(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _checked(value: Any, path: Path) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise EvidenceError(
            f"{path}: is a JSON {type(value).__name__}, and not a list with one object of metrics "
            "per step. Write one: json.dump(trainer.state.log_history, file)."
        )
    return value
