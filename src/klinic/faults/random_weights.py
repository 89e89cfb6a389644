"""random-weights: the model is built from its config, and its weights are not loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.training import train

# fraction of the trained weights that is lost
LOST_FRACTION = {
    Severity.MILD: 0.5,
    Severity.NORMAL: 1.0,
}


@contextmanager
def randomise_weights(severity: Severity) -> Iterator[None]:
    """Replace the loaded weights by small random values."""

    def start_with_random(real: Any, *args: Any) -> Any:
        policy = real(*args)
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in policy.lm.parameters():
                if p.ndim > 1:
                    fresh = 0.02 * torch.randn(p.shape, generator=random)
                    p.lerp_(fresh, LOST_FRACTION[severity])
        return policy

    with patch_attribute(train, "load_start_policy", start_with_random):
        yield


FAULT = Fault(
    cause="random-weights",
    mechanism="weights are not loaded",
    inject=randomise_weights,
    visible_at_start=True,
)
