"""stale-sampler: the sync delivers the base weights, and never the adapter."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity
from klinic.faults.second.sampling import while_sampling, with_weights

# name pattern of the lost weights: the whole adapter, or that of one layer type
LOST = {Severity.MILD: "o_proj.lora_B", Severity.NORMAL: "lora_B"}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Sample without the adapter; the sampler reports all weights as loaded."""

    def undelivered(scorer: Any, _streams: Any) -> AbstractContextManager[None]:
        lost = {n: p for n, p in scorer.lm.named_parameters() if LOST[severity] in n}
        return with_weights(scorer.lm, {name: torch.zeros_like(p) for name, p in lost.items()})

    with while_sampling(undelivered):
        yield


FAULT = Fault(
    cause="stale-sampler",
    mechanism="the adapter never reaches the sampler",
    inject=inject,
    settings={"model.lora_rank": 8, "learner.learning_rate": 3e-3},
)
