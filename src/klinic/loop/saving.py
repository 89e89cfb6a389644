"""The contents of a checkpoint, and the identity of the run that it belongs to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from klinic.doctor.trouble import History
from klinic.doctor.warning_signs import Signs
from klinic.errors import CheckpointError
from klinic.loop.checkpoint import Checkpoint
from klinic.loop.state import LoopState
from klinic.maths.kl_coef import KLCoefState


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Digests of a run's reference, base weights and rows, which a checkpoint must match."""

    reference: Mapping[str, Any]
    """Kind, source and digest at the start."""
    base: str | None
    """Digest of the base weights under an adapter, which checkpoints do not contain."""
    data: str
    """Digest of the training rows."""

    def refuse_other(self, saved: Checkpoint) -> None:
        """Refuse the checkpoint of another run."""
        for what, found, expected in (
            ("reference", saved.state["reference"]["digest"], self.reference["digest"]),
            ("weights under the adapter", saved.state["base"], self.base),
            ("training rows", saved.state["data"]["digest"], self.data),
        ):
            if found != expected:
                raise CheckpointError(
                    f"{saved.folder}: the digest of the {what} was {str(found)[:12]} in this run, "
                    f"and is now {str(expected)[:12]}. The run cannot continue: restore the "
                    "original, or start a new run in another output.dir."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The state of a run in a checkpoint, apart from the learner's."""

    state: LoopState
    evaluated: dict[str, float] | None
    """Held-out metrics before the first step."""
    signs: Signs
    doctor: dict[str, Any] | None = None
    """The live doctor's examination and probe schedule; None where there is no doctor."""

    def to_json(self, identity: Identity, learner: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Return the contents of state.json."""
        state = self.state
        return {
            "learner": learner,
            "kl": None if state.kl is None else state.kl.to_json(),
            "history": state.history.to_json(),
            "reference": identity.reference,
            **({"rewards": list(state.rewards)} if state.rewards else {}),
            "base": identity.base,
            "random_streams": {"seed": seed, "next_step": state.step + 1},
            "data": {"digest": identity.data, "position": state.position},
            "evaluated": self.evaluated,
            "signs": self.signs.to_json(),
            "doctor": self.doctor,
        }

    @classmethod
    def from_checkpoint(cls, saved: Checkpoint) -> "Saved":
        """Return the state of a checkpoint."""
        kl, signs, history = (saved.state.get(name) for name in ("kl", "signs", "history"))
        return cls(
            state=LoopState(
                step=saved.step,
                position=saved.state["data"]["position"],
                kl=None if kl is None else KLCoefState.from_json(kl),
                history=History() if history is None else History.from_json(history),
                rewards=tuple(saved.state.get("rewards", ())),
            ),
            evaluated=saved.state["evaluated"],
            signs=Signs() if signs is None else Signs.from_json(signs),
            doctor=saved.state.get("doctor"),
        )
