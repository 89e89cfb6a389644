"""Proof of a cause for `klinic diagnose --prove`: a replay, or the sentence why there is none."""

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klinic.cli.printing import require_modules
from klinic.cli.recorded_code import announce_code
from klinic.errors import EvidenceError, KlinicError, MissingExtraError

if TYPE_CHECKING:
    from klinic.doctor.diagnosis import Diagnosis
    from klinic.replay.proof import Proof

NO_CHANGE = "no single change in a replay of this run would show this cause."
OF_BUNDLE = "a bundle has no weights to replay a step with. Diagnose the run folder itself."
OF_OTHERS = "--prove replays steps that klinic recorded, and this is the output of another trainer."


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofAttempt:
    """The proof of a cause, or why it cannot be proven."""

    proof: "Proof | None" = None
    obstacle: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the keys that `--json` adds."""
        if self.proof is None:
            return {"proof": None, "not_proven": self.obstacle}
        return {"proof": asdict(self.proof)}


def attempt_proof(run: Path, diagnosis: "Diagnosis", *, run_code: bool) -> ProofAttempt:
    """Replay the first step that shows the cause, if that is possible."""
    obstacle = find_obstacle(run, diagnosis)
    if obstacle:
        return ProofAttempt(obstacle=obstacle)
    require_modules("train", "torch", "transformers", "peft", "safetensors", "datasets")
    try:
        proof = _replay_cause(run, diagnosis, run_code=run_code)
    except MissingExtraError:
        raise
    except KlinicError as error:  # the diagnosis stands without its proof
        return ProofAttempt(obstacle=str(error))
    if proof is None:
        return ProofAttempt(obstacle=NO_CHANGE)
    _store_proof(run, proof)
    return ProofAttempt(proof=proof)


def find_obstacle(run: Path, diagnosis: "Diagnosis") -> str:
    """Return why no cause of this run can be replayed; "" if one may be."""
    from klinic.evidence.bundle_head import is_bundle
    from klinic.evidence.run_facts import RECIPE, RUN_FACTS, read_run_facts
    from klinic.replay.provable import PROVABLE_CAUSES

    if is_bundle(run):
        return OF_BUNDLE
    if diagnosis.cause is None or diagnosis.first_step is None:
        return "the diagnosis names no cause, so there is nothing to prove."
    if diagnosis.cause not in PROVABLE_CAUSES:
        return NO_CHANGE
    facts = read_run_facts(run) if (run / RUN_FACTS).is_file() else {}
    if facts.get("trainer", "klinic") != "klinic" or not (run / RECIPE).is_file():
        return "--prove replays runs that klinic trained, and this one was recorded elsewhere."
    return ""


def _replay_cause(run: Path, diagnosis: "Diagnosis", *, run_code: bool) -> "Proof | None":
    from rich.console import Console

    cause, step = diagnosis.cause, diagnosis.first_step
    assert cause is not None  # noqa: S101 - `find_obstacle`
    assert step is not None  # noqa: S101 - `find_obstacle`
    _announce_run_code(run, run_code=run_code)
    with Console(stderr=True).status(f"Replaying step {step} ..."):
        from klinic.replay.proof import prove_cause

        return prove_cause(run, cause, step, run_code=run_code)


def _store_proof(run: Path, proof: "Proof") -> None:
    """Write the proof into the run folder for its report; skip it where that is not allowed."""
    from klinic.evidence.files import json_bytes
    from klinic.evidence.run_facts import PROOF
    from klinic.evidence.writing import write_atomically

    with suppress(OSError, EvidenceError, ValueError):
        write_atomically(run / PROOF, json_bytes(asdict(proof)) + b"\n")


def _announce_run_code(run: Path, *, run_code: bool) -> None:
    """Print which code of the run a replay executes or skips."""
    from klinic.evidence.run_facts import RECIPE
    from klinic.recipe.recorded import load_recorded

    if (run / RECIPE).is_file():
        recorded = load_recorded(run / RECIPE, run_code=run_code)
        announce_code(recorded.allowed, recorded.refused)
