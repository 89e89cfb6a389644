"""kl-not-applied: the KL term is computed and never reaches the backward pass.

Second mechanism: the KL term is computed without a gradient, and only its value is added.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner import micro_batch_loss, objective


@contextmanager
def detach_kl_sum(severity: Severity) -> Iterator[None]:
    """Detach the KL term, or count it twice."""

    def terms_without_kl_gradient(real: Any, *args: Any) -> Any:
        parts = real(*args)
        if parts.kl is None:
            return parts
        if severity is Severity.MILD:
            return replace(parts, kl=2 * parts.kl)
        return replace(parts, kl=parts.kl.detach() + 0.0 * parts.policy)

    with patch_attribute(micro_batch_loss, "loss_terms", terms_without_kl_gradient):
        yield


FAULT = Fault(
    cause="kl-not-applied",
    mechanism="the KL term is detached from its graph",
    inject=detach_kl_sum,
)


REMAINING_GRADIENT = {Severity.MILD: 0.7, Severity.NORMAL: 0.0}  # fraction of the gradient


@contextmanager
def detach_kl_terms(severity: Severity) -> Iterator[None]:
    """Detach the log-probs of the KL term."""
    left = REMAINING_GRADIENT[severity]

    def detached_kl_term(real: Any, name: str, inputs: Any, **options: Any) -> Any:
        terms = real(name, inputs, **options)
        return (1 - left) * terms.detach() + left * terms

    with patch_attribute(objective, "kl_term", detached_kl_term):
        yield


SECOND_FAULT = Fault(
    cause="kl-not-applied",
    mechanism="the KL term uses detached log-probs",
    inject=detach_kl_terms,
    settings={"kl.coef": 1.0, "loop.max_steps": 11},
)
