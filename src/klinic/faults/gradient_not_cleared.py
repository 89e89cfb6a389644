"""gradient-not-cleared: the gradient of an update is kept, and the next one is added to it.

Second mechanism: a buffer that sums gradients over processes still holds those of the batch before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner.local import LocalLearner

KEPT_FRACTION = {Severity.MILD: 0.2, Severity.NORMAL: 1.0}  # of the gradient
SOME_EQUAL_GROUPS = {
    # two prompts whose completions often have equal rewards, and no other term
    "kl.coef": 0.0,
    "rewards": ["binary"],
    "warm_start.steps": 600,
    "loop.prompts_per_step": 2,
    "loop.max_steps": 14,
}


@contextmanager
def keep_gradient(severity: Severity) -> Iterator[None]:
    """Scale the gradient instead of clearing it, once per update."""

    def commit_and_keep(real: Any, self: Any, **options: Any) -> Any:
        kept = [(p, p.grad) for p in self._trained.values() if p.grad is not None]
        metrics = real(self, **options)
        for parameter, gradient in kept:
            parameter.grad = KEPT_FRACTION[severity] * gradient
        return metrics

    def discard_only_new(real: Any, self: Any) -> None:
        """Leave what `commit_and_keep` has put back."""
        if not self._num_updates:
            real(self)

    with (
        patch_attribute(LocalLearner, "commit", commit_and_keep),
        patch_attribute(LocalLearner, "discard", discard_only_new),
    ):
        yield


FAULT = Fault(
    cause="gradient-not-cleared",
    mechanism="the gradient is not set to zero after an update",
    inject=keep_gradient,
    settings=SOME_EQUAL_GROUPS,
)


LEFT_IN_BUFFER = {Severity.MILD: 0.1, Severity.NORMAL: 1.0}  # of the batch before


@contextmanager
def add_previous_batch(severity: Severity) -> Iterator[None]:
    """Add the gradient of the batch before to that of every batch."""
    buffer: dict[int, Tensor] = {}

    def backprop_and_add(real: Any, self: Any, *args: Any) -> Any:
        scores = real(self, *args)
        for parameter in self._trained.values():
            if parameter.grad is None:
                continue
            previous = buffer.get(id(parameter))
            buffer[id(parameter)] = parameter.grad.clone()
            if previous is not None:
                parameter.grad += LEFT_IN_BUFFER[severity] * previous
        return scores

    with patch_attribute(LocalLearner, "_backprop_batches", backprop_and_add):
        yield


SECOND_FAULT = Fault(
    cause="gradient-not-cleared",
    mechanism="a buffer still holds the gradient of the batch before",
    inject=add_previous_batch,
    settings=SOME_EQUAL_GROUPS,
)
