"""Refuses trainers whose loss klinic could not see.

klinic reads a step where TRL's `compute_loss` calls `_compute_loss`, and that scores its batch. A
subclass that computes the loss elsewhere would leave no batch to record.
"""

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from klinic.errors import ConfigError

LOSS_METHODS = {
    "compute_loss": ("_compute_loss",),
    "_compute_loss": ("_get_per_token_logps_and_entropies",),
}
"""Methods that a subclass may override, and those of which it must call one: these, or its own of
the superclass."""
DISTILLATION_TRAINERS = (
    *("DistillationTrainer", "GKDTrainer", "GOLDTrainer", "IWOPDTrainer"),
    *("SDFTTrainer", "SDPOTrainer", "MiniLLMTrainer"),
)
RECORDER = "Record your loop with klinic.Recorder instead, or attach to TRL's own GRPOTrainer."


def reject_hidden_loss(trainer: Any) -> None:
    """Raise `ConfigError` for Unsloth's trainer, other kinds of TRL, and hidden losses."""
    from trl import GRPOTrainer

    kind = type(trainer)
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    if any("unsloth" in name.lower() for name in names):
        raise ConfigError(
            f"klinic.attach received Unsloth's {kind.__name__}: it replaces TRL's compute_loss by "
            "its own, which returns no log-probs, so no step could be recorded. Import trl "
            f"without unsloth for a short run on TRL's own trainer. {RECORDER}"
        )
    if any("AsyncGRPOTrainer" in name for name in names):
        raise ConfigError(
            "klinic.attach received TRL's AsyncGRPOTrainer: another process generates while it "
            "trains, from a queue, and none of the methods that klinic reads exist in it. "
            f"{RECORDER}"
        )
    if distils := next((base.__name__ for base in kind.__mro__ if _distils(base.__name__)), None):
        raise ConfigError(
            f"klinic.attach received TRL's {distils}: its loss compares hidden states in chunks "
            "and keeps no log-prob of a token, neither the student's nor the teacher's, so no step "
            "could be recorded. Distil with a `teacher` section of a klinic recipe, or record your "
            "loop with klinic.Recorder, which takes logp_teacher."
        )
    if not isinstance(trainer, GRPOTrainer):
        raise ConfigError(
            f"klinic.attach received a {kind.__name__}: it supports TRL's GRPOTrainer only. Pass "
            f"one, before trainer.train(). {RECORDER}"
        )
    if getattr(trainer, "_is_vlm", False):
        raise ConfigError(
            "this trainer's model reads images: klinic records token ids only, and probes that "
            "score some rows of a batch would lose theirs. Train the text model, or leave klinic "
            "out."
        )
    for name, wanted in LOSS_METHODS.items():
        if not _reaches(kind, name, (name, *wanted), GRPOTrainer):
            raise ConfigError(
                f"klinic.attach received a {kind.__name__} whose {name} calls neither TRL's nor "
                f"{wanted[0]}: klinic reads every step there, and no step could be recorded. Call "
                f"super().{name} or {wanted[0]}. {RECORDER}"
            )


def _distils(name: str) -> bool:
    """Whether a class is one of TRL's trainers towards a teacher."""
    return name.endswith(DISTILLATION_TRAINERS)


def _reaches(kind: type, name: str, wanted: tuple[str, ...], base: type) -> bool:
    """Whether a class's method of this name is TRL's, or calls one of the wanted names.

    Methods of the class that it calls are followed; so are functions defined inside it.
    """
    method = getattr(kind, name)
    if method is getattr(base, name):
        return True
    seen: set[str] = set()
    pending = [method]
    while pending:
        # decorators of TRL and of users keep the function that they wrap
        code = getattr(inspect.unwrap(pending.pop()), "__code__", None)
        if code is None:  # compiled: a step that leaves no batch is reported
            return True
        called = set(_names(code))
        if called & set(wanted):
            return True
        own = {n for n in called - seen if callable(getattr(kind, n, None))}
        seen |= own
        pending += [getattr(kind, n) for n in own if not hasattr(base, n)]
    return False


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and those inside it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
