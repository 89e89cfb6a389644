"""Refuses runs of a newer klinic: run.json, records and checkpoints hold a schema version."""

from pathlib import Path

from klinic.errors import EvidenceError
from klinic.evidence.files import read_json
from klinic.evidence.run_facts import RUN_FACTS
from klinic.evidence.schema_version import SCHEMA

CHECKPOINTS = "checkpoints"
STATE = "state.json"
CHECKPOINT_SCHEMA = 1
LARGEST = 1 << 24  # bytes of a file to inspect; klinic writes far smaller ones


def refuse_newer(run: Path) -> None:
    """Raise `EvidenceError` for a run with a newer schema; unreadable files are ignored here."""
    manifest = max((run / "records").glob("step=*/complete.json"), default=None)
    newest = {} if manifest is None else {manifest: SCHEMA}
    states = (run / CHECKPOINTS).glob(f"step=*/{STATE}")
    newest_by_path = {run / RUN_FACTS: SCHEMA, **newest, **dict.fromkeys(states, CHECKPOINT_SCHEMA)}
    for path, newest_known in newest_by_path.items():
        schema = read_schema(path)
        if schema is not None and schema > newest_known:
            raise EvidenceError(
                f"{path}: has schema {schema}, but this klinic reads up to {newest_known}: a newer "
                "klinic wrote the run, and fields may have changed their meaning. Update klinic; "
                "nothing was changed."
            )


def read_schema(path: Path) -> int | None:
    """Return the schema of a JSON file; None if it is unreadable or has none."""
    try:
        if path.stat().st_size > LARGEST:
            return None
        schema = read_json(path).get("schema")
    except (EvidenceError, OSError):
        return None
    return schema if isinstance(schema, int) and not isinstance(schema, bool) else None
