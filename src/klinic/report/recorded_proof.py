"""The proof of a cause that `klinic diagnose --prove` stored in the run folder."""

import math
from dataclasses import dataclass
from pathlib import Path

from klinic.errors import EvidenceError
from klinic.evidence.files import read_json
from klinic.evidence.numbers import as_number, as_step
from klinic.evidence.run_facts import PROOF

MAX_CHARS = 300  # characters of a text


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProof:
    """One quantity of a replayed step, without and with one change."""

    changed: str
    quantity: str
    before: float
    after: float
    confirmed: bool
    step: int


def read_proof(run: Path, cause: str | None) -> RecordedProof | None:
    """Return the stored proof of this cause; None if there is none."""
    try:
        stored = read_json(run / PROOF)
    except EvidenceError:
        return None
    before, after = as_number(stored.get("before")), as_number(stored.get("after"))
    step = as_step(stored.get("step"))
    if cause is None or stored.get("cause") != cause or step is None:
        return None
    if before is None or after is None or not (math.isfinite(before) and math.isfinite(after)):
        return None
    return RecordedProof(
        changed=str(stored.get("changed"))[:MAX_CHARS],
        quantity=str(stored.get("quantity"))[:MAX_CHARS],
        before=before,
        after=after,
        confirmed=stored.get("confirmed") is True,
        step=step,
    )
