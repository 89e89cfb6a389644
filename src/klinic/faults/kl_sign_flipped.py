"""kl-sign-flipped: the KL term is subtracted from the minimised loss.

Second mechanism: the KL in the reward is added as a bonus, not subtracted as a cost.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner import micro_batch_loss, objective

KL_FACTOR = {Severity.MILD: -0.3, Severity.NORMAL: -1.0}


@contextmanager
def negate_kl_sum(severity: Severity) -> Iterator[None]:
    """Negate the KL term."""

    def terms_with_negated_kl(real: Any, *args: Any) -> Any:
        parts = real(*args)
        return parts if parts.kl is None else replace(parts, kl=KL_FACTOR[severity] * parts.kl)

    with patch_attribute(micro_batch_loss, "loss_terms", terms_with_negated_kl):
        yield


FAULT = Fault(cause="kl-sign-flipped", mechanism="the KL term is negated", inject=negate_kl_sum)


BONUS_STRENGTH = {Severity.MILD: 0.2, Severity.NORMAL: 1.0}  # of the bonus, the cost being 1


@contextmanager
def add_kl_bonus(severity: Severity) -> Iterator[None]:
    """Keep the value of the KL term, and negate its gradient."""
    strength = BONUS_STRENGTH[severity]

    def bonus_kl_term(real: Any, name: str, inputs: Any, **options: Any) -> Any:
        terms = real(name, inputs, **options)
        return (1 + strength) * terms.detach() - strength * terms

    with patch_attribute(objective, "kl_term", bonus_kl_term):
        yield


SECOND_FAULT = Fault(
    cause="kl-sign-flipped",
    mechanism="the KL in the reward is a bonus",
    inject=add_kl_bonus,
    settings={"kl.estimator": "k1_reward", "kl.coef": 0.5, "loop.max_steps": 11},
)
