"""The checkpoints of a run: learner, loop state and doctor saved together, and restored."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klinic.doctor.anomalies import History
from klinic.doctor.live import DoctorCheckpoint, RunDoctor
from klinic.doctor.warning_signs import WarningState
from klinic.errors import CheckpointError, RunStoppedError
from klinic.evidence.writing import write_durably
from klinic.learner.checkpoint import MODEL_DIR
from klinic.learner.protocol import LearnerState
from klinic.maths.kl_coef import KLCoefState
from klinic.model.reference import ReferenceIdentity
from klinic.report.model_card import CARD_NAME, CardFacts, model_card
from klinic.training import checkpoint
from klinic.training.checkpoint import Checkpoint
from klinic.training.parts import RunParts
from klinic.training.recovery import RecoveryManager
from klinic.training.run_log import RunLog
from klinic.training.state import LoopState


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Digests of a run's frozen models, base weights and rows, which a checkpoint must match."""

    reference: ReferenceIdentity
    """The reference at the start."""
    teacher: ReferenceIdentity
    base_digest: str | None
    """Digest of the base weights under an adapter, which checkpoints do not contain."""
    data_digest: str
    """Digest of the training rows."""

    def refuse_other_run(self, saved: Checkpoint) -> None:
        """Refuse the checkpoint of another run."""
        for what, saved_digest, expected in (
            ("reference", saved.state["reference"]["digest"], self.reference["digest"]),
            ("teacher", _teacher_digest(saved.state), self.teacher["digest"]),
            ("weights under the adapter", saved.state["base"], self.base_digest),
            ("training rows", saved.state["data"]["digest"], self.data_digest),
        ):
            if saved_digest != expected:
                raise CheckpointError(
                    f"{saved.folder}: the digest of the {what} was "
                    f"{str(saved_digest)[:12]} in this run, "
                    f"and is now {str(expected)[:12]}. The run cannot continue: restore the "
                    "original, or start a new run in another output.dir."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run in a checkpoint, apart from that of learner and doctor."""

    state: LoopState
    initial_eval: dict[str, float] | None
    """Held-out metrics before the first step."""
    signs: WarningState

    def to_json(
        self,
        identity: RunIdentity,
        *,
        learner: LearnerState,
        doctor: Mapping[str, Any] | None,
        seed: int,
    ) -> dict[str, Any]:
        """Return the contents of state.json; `doctor` is None where there is no live doctor."""
        state = self.state
        return {
            "learner": learner,
            "kl": None if state.kl is None else state.kl.to_json(),
            "history": state.history.to_json(),
            "reference": identity.reference,
            "teacher": identity.teacher,
            **({"rewards": list(state.rewards)} if state.rewards else {}),
            "base": identity.base_digest,
            "random_streams": {"seed": seed, "next_step": state.step + 1},
            "data": {"digest": identity.data_digest, "position": state.batch_index},
            "evaluated": self.initial_eval,
            "signs": self.signs.to_json(),
            "doctor": doctor,
        }

    @classmethod
    def from_checkpoint(cls, saved: Checkpoint) -> "RunState":
        """Return the state of a checkpoint."""
        kl, signs, history = (saved.state.get(name) for name in ("kl", "signs", "history"))
        return cls(
            state=LoopState(
                step=saved.step,
                batch_index=saved.state["data"]["position"],
                kl=None if kl is None else KLCoefState.from_json(kl),
                history=History() if history is None else History.from_json(history),
                rewards=tuple(saved.state.get("rewards", ())),
            ),
            initial_eval=saved.state["evaluated"],
            signs=WarningState() if signs is None else WarningState.from_json(signs),
        )


def _teacher_digest(state: Mapping[str, Any]) -> str | None:
    """Return the digest of a checkpoint's teacher; older checkpoints were made without one."""
    teacher = state.get("teacher")
    return None if teacher is None else teacher["digest"]


class RunCheckpoints:
    """Saves and restores the state of a run."""

    def __init__(
        self, parts: RunParts, log: RunLog, recovery: RecoveryManager, doctor: RunDoctor
    ) -> None:
        self._parts = parts
        self._log = log
        self._recovery = recovery
        self._doctor = doctor
        self.doctor_state: DoctorCheckpoint | None = None
        """The doctor's part of the checkpoint that was restored last."""

    @property
    def named_causes(self) -> list[str] | None:
        """Causes that the doctor had named in the restored checkpoint; None without its state."""
        return None if self.doctor_state is None else self.doctor_state.state["named"]

    def save(self, run_state: RunState, metrics: Mapping[str, float]) -> Path:
        """Write a checkpoint; `metrics` of its step go into the model card."""
        parts, state = self._parts, run_state.state

        def write_contents(folder: Path) -> dict[str, Any]:
            learner = parts.learner.save(folder)
            card = model_card(self._card_facts(state, learner, metrics))
            write_durably(folder / MODEL_DIR / CARD_NAME, card.encode("utf-8", "backslashreplace"))
            doctor = self._doctor.save(folder)
            return run_state.to_json(
                self._run_identity, learner=learner, doctor=doctor, seed=parts.recipe.seed
            )

        return checkpoint.write_checkpoint(
            parts.folder,
            state.step,
            write_contents=write_contents,
            num_kept=parts.recipe.loop.keep_checkpoints,
            protected_step=self._recovery.protected_checkpoint(state.history),
        )

    def restore(self, saved: Checkpoint) -> RunState:
        """Load a checkpoint of this run into the learner; return the rest of its state."""
        self._run_identity.refuse_other_run(saved)
        self._parts.learner.load(saved.folder, saved.state["learner"])
        doctor = saved.state.get("doctor")
        self.doctor_state = (
            None if doctor is None else DoctorCheckpoint(state=doctor, folder=saved.folder)
        )
        return RunState.from_checkpoint(saved)

    def restore_finite(self, step: int) -> tuple[RunState, list[str]]:
        """Restore the newest checkpoint, at most of `step`, that is valid and finite.

        Also returns what was wrong with those passed over.
        """
        problems: list[str] = []
        while True:
            search = checkpoint.newest_valid(self._parts.folder, max_step=step)
            problems += search.broken
            if search.checkpoint is None:
                raise RunStoppedError(
                    f"{self._parts.display_folder}: no valid checkpoint is left to roll back to."
                )
            run_state = self.restore(search.checkpoint)
            if all(self._parts.learner.all_finite().values()):
                return run_state, problems
            problems.append(f"{search.checkpoint.folder} holds non-finite values.")
            step = run_state.state.step - 1

    def _card_facts(
        self, state: LoopState, learner: LearnerState, metrics: Mapping[str, float]
    ) -> CardFacts:
        parts = self._parts
        return CardFacts(
            recipe=parts.recipe,
            step=state.step,
            kl_coef=None if state.kl is None else state.kl.coef,
            reference={**parts.reference, **learner.get("reference", {})},
            teacher=parts.teacher,
            metrics=metrics,
            causes=self._log.named_causes() if self._doctor.is_enabled else None,
        )

    @property
    def _run_identity(self) -> RunIdentity:
        return RunIdentity(
            reference=self._parts.reference,
            teacher=self._parts.teacher,
            base_digest=self._parts.digests.base,
            data_digest=self._parts.prompt_dataset.digest,
        )
