"""loss-scaled-wrong: each micro-batch is averaged over its own tokens, and the means are summed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.learner import local

POWER = {Severity.MILD: 0.1, Severity.NORMAL: 1.0}  # exponent of the micro-batch's weight


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Divide by the tokens of the micro-batch instead of those of the step."""

    def own_mean(weights: Any) -> Any:
        return weights / weights.sum().clip(min=1e-9) ** POWER[severity]

    def parts(real: Any, scores: Any, targets: Any, objective: Any) -> Any:
        own = {n: own_mean(getattr(targets, n)) for n in ("policy_weight", "kl_weight")}
        return real(scores, replace(targets, **own), objective)

    with patched(local, "loss_parts", parts):
        yield


FAULT = Fault(
    cause="loss-scaled-wrong",
    mechanism="means of micro-batches are summed",
    inject=inject,
    settings={"learner.loss": "dapo", "learner.micro_batch_size": 8},
    visible_at_start=True,
)
