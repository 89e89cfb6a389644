"""loss-scaled-wrong: each micro-batch is divided once more by their number."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.learner import local

POWER = {Severity.MILD: 0.2, Severity.NORMAL: 1.0}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Divide an average by the accumulation steps once more."""
    now = {"num": 1}

    def counted(real: Any, self: Any, scored: Any, **how: Any) -> Any:
        now["num"] = len(scored.batches)
        return real(self, scored, **how)

    def divided(real: Any, *given: Any) -> Any:
        parts = real(*given)
        factor = now["num"] ** -POWER[severity]
        kl = None if parts.kl is None else factor * parts.kl
        return replace(parts, policy=factor * parts.policy, kl=kl)

    with ExitStack() as stack:
        stack.enter_context(patched(local.LocalLearner, "prepare", counted))
        stack.enter_context(patched(local, "loss_parts", divided))
        yield


FAULT = Fault(
    cause="loss-scaled-wrong",
    mechanism="the loss is divided by the number of micro-batches twice",
    inject=inject,
    settings={"learner.micro_batch_size": 16},
    visible_at_start=True,
)
