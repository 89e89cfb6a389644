"""imprecise-logp: the sampler uses 8-bit weights, the learner full precision."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity
from klinic.faults.second.sampling import while_sampling, with_weights

KEPT = {Severity.MILD: torch.bfloat16, Severity.NORMAL: torch.float8_e5m2}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Round every matrix whenever the engine samples."""

    def rounded(scorer: Any, _streams: Any) -> AbstractContextManager[None]:
        matrices = {n: p.detach() for n, p in scorer.lm.named_parameters() if p.ndim > 1}
        few = {n: p.to(KEPT[severity]).to(p.dtype) for n, p in matrices.items()}
        return with_weights(scorer.lm, few)

    with while_sampling(rounded):
        yield


FAULT = Fault(
    cause="imprecise-logp",
    mechanism="the sampler's weights are rounded to 8 bits",
    inject=inject,
    visible_at_start=True,
)
