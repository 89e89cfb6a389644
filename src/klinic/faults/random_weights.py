"""random-weights: the model is made from its config, and its weights are not loaded."""

from contextlib import AbstractContextManager, nullcontext

from klinic.faults.base import Fault, Severity


def inject(severity: Severity) -> AbstractContextManager[None]:
    """Do nothing: the recipe leaves the warm start out."""
    del severity
    return nullcontext()


FAULT = Fault(
    cause="random-weights",
    mechanism="no weights are loaded",
    inject=inject,
    settings={"warm_start": None},
    visible_at_start=True,
)
