"""Saves the state of the KL controller in TRL's checkpoints, and reads it back.

The file `klinic_kl.json` is in TRL's folder `checkpoint-N`, so that TRL's rotation
removes both. Floats round-trip through JSON exactly: a resumed run uses the same coefficients.
"""

from dataclasses import dataclass
from pathlib import Path

from klinic.errors import EvidenceError
from klinic.evidence.files import json_bytes, read_json
from klinic.evidence.writing import write_atomically
from klinic.maths.kl_coef import KLCoefState

STATE_FILE = "klinic_kl.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KLCheckpoint:
    """State of the controller after a number of updates."""

    state: KLCoefState
    done_steps: int


def save_kl_state(folder: Path, saved: KLCheckpoint) -> None:
    """Write the state into a checkpoint folder of TRL."""
    values = {"schema": SCHEMA, "done_steps": saved.done_steps, "kl": saved.state.to_json()}
    write_atomically(folder / STATE_FILE, json_bytes(values))


def load_kl_state(folder: Path) -> KLCheckpoint | None:
    """Return the state in a checkpoint folder of TRL; None if it was saved without klinic."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    values = read_json(path)
    if values.get("schema") != SCHEMA:
        raise EvidenceError(
            f"{path}: has schema {values.get('schema')}, and this klinic reads {SCHEMA}. "
            "Update klinic, or delete the file to start the controller from KL(coef)."
        )
    try:
        state = KLCoefState.from_json(values["kl"])
        return KLCheckpoint(state=state, done_steps=int(values["done_steps"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EvidenceError(
            f"{path}: is not the state of a KL controller ({error!r}). It was cut short or edited; "
            "restore it, or delete it to start the controller from KL(coef)."
        ) from error
