"""wrong-reference: the reference is a perturbed copy of the initial policy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import train

NOISE = {Severity.MILD: 0.01, Severity.NORMAL: 0.1}  # fraction of each tensor's standard deviation


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Add noise to every weight of the reference."""

    def disturbed(real: Any, recipe: Any, policy: Any, where: str) -> Any:
        reference = real(recipe, policy, where)
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in reference.scorer.lm.parameters():
                p.add_(NOISE[severity] * p.std() * torch.randn(p.shape, generator=random))
        return reference

    with patched(train, "start_reference", disturbed):
        yield


FAULT = Fault(
    cause="wrong-reference",
    mechanism="other weights than the initial ones",
    inject=inject,
    visible_at_start=True,
)
