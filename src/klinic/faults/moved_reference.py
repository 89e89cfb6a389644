"""moved-reference: the reference shares the policy's weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.learner.local import LocalLearner

EVERY = {Severity.MILD: 3, Severity.NORMAL: 1}  # updates


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Copy the policy into the reference before scoring."""

    def follows(real: Any, self: Any, *given: Any, **how: Any) -> Any:
        if self._num_updates % EVERY[severity] == 0 and self._reference is not None:
            self._reference.scorer.lm.load_state_dict(self._policy.lm.state_dict())
        return real(self, *given, **how)

    with patched(LocalLearner, "score", follows):
        yield


FAULT = Fault(cause="moved-reference", mechanism="the reference is the policy", inject=inject)
