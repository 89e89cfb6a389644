"""temperature-on-one-side: policy and sampler apply the temperature, the reference does not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import assembly

REFERENCE = {Severity.MILD: 0.65, Severity.NORMAL: 1.0}  # its temperature


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Undo the temperature in the reference's scorer."""

    def unscaled(real: Any, policy: Any, **how: Any) -> Any:
        reference = real(policy, **how)
        reference.scorer.head.scale *= policy.temperature / REFERENCE[severity]
        return reference

    with patched(assembly, "as_it_starts", unscaled):
        yield


FAULT = Fault(
    cause="temperature-on-one-side",
    mechanism="the reference's logits are not divided by the temperature",
    inject=inject,
    settings={"sampling.temperature": 0.6},
    visible_at_start=True,
)
