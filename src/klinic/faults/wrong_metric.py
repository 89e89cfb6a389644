"""wrong-metric: the KL is logged in the other direction."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.evidence import metrics
from klinic.faults.base import Fault, Severity, patched
from klinic.loop import step_metrics
from klinic.maths import kl

SHARE = {Severity.MILD: 0.3, Severity.NORMAL: 1.0}  # interpolation towards the wrong value


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Swap policy and reference in the logged KL."""

    def swapped(real: Any, record: Any) -> Any:
        told = real(record)
        if record.logp_ref is None or record.logp_old is None:
            return told
        both = {"logp_p": metrics._wide(record.logp_ref), "logp_q": metrics._wide(record.logp_old)}
        wrong = float(kl.k3(**both)[record.loss_mask].mean())
        mixed = (1 - SHARE[severity]) * told["kl"] + SHARE[severity] * wrong
        return {**told, "kl": mixed}

    with patched(step_metrics, "step_metrics", swapped):
        yield


FAULT = Fault(cause="wrong-metric", mechanism="the KL in the other direction", inject=inject)
