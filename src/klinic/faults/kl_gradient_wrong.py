"""kl-gradient-wrong: k1 is differentiated, whose expected gradient is 0.

Second mechanism: k3 is differentiated; unclamped and on policy, that descends the KL in the other
direction, token by token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner import objective

WRONG_ESTIMATOR = {Severity.MILD: "k3", Severity.NORMAL: "k1"}


@contextmanager
def replace_kl_estimator(severity: Severity) -> Iterator[None]:
    """Use another estimator than the recipe's."""

    def other_kl_term(real: Any, name: str, inputs: Any, **options: Any) -> Any:
        del name
        return real(WRONG_ESTIMATOR[severity], inputs, **options)

    with patch_attribute(objective, "kl_term", other_kl_term):
        yield


FAULT = Fault(
    cause="kl-gradient-wrong",
    mechanism="k1 in the loss, where the recipe selects unbiased",
    inject=replace_kl_estimator,
)


K3_FRACTION = {Severity.MILD: 0.3, Severity.NORMAL: 1.0}  # fraction of the term


@contextmanager
def differentiate_k3(severity: Severity) -> Iterator[None]:
    """Differentiate k3 where the recipe selects `unbiased`."""
    k3_fraction = K3_FRACTION[severity]

    def mixed_kl_term(real: Any, name: str, inputs: Any, **options: Any) -> Any:
        return k3_fraction * real("k3", inputs, **options) + (1 - k3_fraction) * real(
            name, inputs, **options
        )

    with patch_attribute(objective, "kl_term", mixed_kl_term):
        yield


SECOND_FAULT = Fault(
    cause="kl-gradient-wrong",
    mechanism="k3 is differentiated although the recipe selects unbiased",
    inject=differentiate_k3,
    settings={"kl.coef": 0.3, "learner.learning_rate": 2e-3, "loop.max_steps": 14},
)
