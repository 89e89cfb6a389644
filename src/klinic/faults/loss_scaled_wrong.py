"""loss-scaled-wrong: each micro-batch is divided once more by their number.

Second mechanism: each micro-batch is averaged over its own tokens, and the means are summed.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner import local, micro_batch_loss

DIVISOR_POWER = {Severity.MILD: 0.2, Severity.NORMAL: 1.0}


@contextmanager
def divide_by_micro_batches(severity: Severity) -> Iterator[None]:
    """Divide an average by the accumulation steps once more."""
    current = {"num": 1}

    def prepare_and_count(real: Any, self: Any, scored: Any, scales: Any) -> Any:
        current["num"] = len(scored.batches)
        return real(self, scored, scales)

    def divided_terms(real: Any, *args: Any) -> Any:
        parts = real(*args)
        factor = current["num"] ** -DIVISOR_POWER[severity]
        kl = None if parts.kl is None else factor * parts.kl
        return replace(parts, policy=factor * parts.policy, kl=kl)

    with ExitStack() as stack:
        stack.enter_context(patch_attribute(local.LocalLearner, "prepare", prepare_and_count))
        stack.enter_context(patch_attribute(micro_batch_loss, "loss_terms", divided_terms))
        yield


FAULT = Fault(
    cause="loss-scaled-wrong",
    mechanism="the loss is divided by the number of micro-batches twice",
    inject=divide_by_micro_batches,
    settings={"learner.micro_batch_size": 16},
    visible_at_start=True,
)


MEAN_POWER = {Severity.MILD: 0.1, Severity.NORMAL: 1.0}  # exponent of the micro-batch's weight


@contextmanager
def average_per_micro_batch(severity: Severity) -> Iterator[None]:
    """Divide by the tokens of the micro-batch instead of those of the step."""

    def micro_batch_mean(weights: Any) -> Any:
        return weights / weights.sum().clip(min=1e-9) ** MEAN_POWER[severity]

    def micro_batch_terms(real: Any, scores: Any, targets: Any, objective: Any) -> Any:
        own = {n: micro_batch_mean(getattr(targets, n)) for n in ("policy_weight", "kl_weight")}
        return real(scores, replace(targets, **own), objective)

    with patch_attribute(micro_batch_loss, "loss_terms", micro_batch_terms):
        yield


SECOND_FAULT = Fault(
    cause="loss-scaled-wrong",
    mechanism="means of micro-batches are summed",
    inject=average_per_micro_batch,
    settings={"learner.loss": "dapo", "learner.micro_batch_size": 8},
    visible_at_start=True,
)
