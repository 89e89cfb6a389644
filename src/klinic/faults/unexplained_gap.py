"""unexplained-gap: one of several replicas of the sampler has weights in few bits.

No cause of the catalogue has this form: a part of the rows is far off, in both directions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.faults.sampler_patches import use_weights
from klinic.sampler import transformers

NUM_REPLICAS = 3
NUM_LEVELS = {Severity.MILD: 7, Severity.NORMAL: 3}  # of a weight, both signs and 0


@contextmanager
def quantize_one_replica(severity: Severity) -> Iterator[None]:
    """Decode every third row with rounded weights."""

    def decode_by_replica(real: Any, scorer: Any, streams: Any, *, params: Any, **rest: Any) -> Any:
        if params.temperature == 0:  # an evaluation
            yield from real(scorer, streams, params=params, **rest)
            return
        coarse = {
            name: _round_weights(p.detach(), NUM_LEVELS[severity])
            for name, p in scorer.lm.named_parameters()
            if p.dim() > 1
        }
        for replica in range(NUM_REPLICAS):
            numbers = list(range(replica, len(streams), NUM_REPLICAS))
            if not numbers:
                continue
            with use_weights(scorer.lm, {} if replica else coarse):
                part = [streams[i] for i in numbers]
                finished = list(real(scorer, part, params=params, **rest))
            yield from ([numbers[i] for i in rows] for rows in finished)

    with patch_attribute(transformers, "decode", decode_by_replica):
        yield


def _round_weights(weights: Tensor, num_levels: int) -> Tensor:
    step = 2 * weights.abs().amax(-1, keepdim=True) / (num_levels - 1)
    return torch.where(step > 0, torch.round(weights / step) * step, weights)


FAULT = Fault(
    cause="unexplained-gap",
    mechanism="one of three replicas has weights in few bits",
    inject=quantize_one_replica,
    visible_at_start=True,
)
