"""kl-gradient-wrong: k1 is differentiated, whose expected gradient is 0."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.learner import objective

INSTEAD = {Severity.MILD: "k3", Severity.NORMAL: "k1"}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Use another estimator than the recipe's."""

    def other(real: Any, name: str, inputs: Any, **how: Any) -> Any:
        del name
        return real(INSTEAD[severity], inputs, **how)

    with patched(objective, "kl_term", other):
        yield


FAULT = Fault(
    cause="kl-gradient-wrong",
    mechanism="k1 in the loss, where the recipe selects unbiased",
    inject=inject,
)
