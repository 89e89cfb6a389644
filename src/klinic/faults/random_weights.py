"""random-weights: the model is built from its config, and its weights are not loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import train

LOST = {Severity.MILD: 0.5, Severity.NORMAL: 1.0}  # fraction of the trained weights that is lost


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Replace the loaded weights by small random values."""

    def unloaded(real: Any, *given: Any) -> Any:
        policy, where = real(*given)
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in policy.lm.parameters():
                if p.ndim > 1:
                    fresh = 0.02 * torch.randn(p.shape, generator=random)
                    p.lerp_(fresh, LOST[severity])
        return policy, where

    with patched(train, "start_policy", unloaded):
        yield


FAULT = Fault(
    cause="random-weights",
    mechanism="weights are not loaded",
    inject=inject,
    visible_at_start=True,
)
