"""imprecise-logp: the sampler's logits are rounded to a few bits.

Second mechanism: the sampler uses 8-bit weights, the learner full precision.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.faults.sampler_patches import use_weights, while_sampling
from klinic.sampler import decoding

LOGIT_STEP = {Severity.MILD: 0.125, Severity.NORMAL: 0.5}  # quantisation step of the logits


@contextmanager
def round_logits(severity: Severity) -> Iterator[None]:
    """Round the logits before sampling."""

    def draw_rounded(real: Any, logits: Any, uniform: Any, params: Any) -> Any:
        if params.temperature:  # 0 in evaluations
            logits = (logits / LOGIT_STEP[severity]).round() * LOGIT_STEP[severity]
        return real(logits, uniform, params)

    with patch_attribute(decoding, "sample_tokens", draw_rounded):
        yield


FAULT = Fault(
    cause="imprecise-logp",
    mechanism="rounded logits",
    inject=round_logits,
    visible_at_start=True,
)


SAMPLER_DTYPE = {Severity.MILD: torch.bfloat16, Severity.NORMAL: torch.float8_e5m2}


@contextmanager
def round_sampler_weights(severity: Severity) -> Iterator[None]:
    """Round every matrix whenever the engine samples."""

    def use_rounded_weights(scorer: Any, _streams: Any) -> AbstractContextManager[None]:
        matrices = {n: p.detach() for n, p in scorer.lm.named_parameters() if p.ndim > 1}
        rounded_weights = {
            n: p.to(SAMPLER_DTYPE[severity]).to(p.dtype) for n, p in matrices.items()
        }
        return use_weights(scorer.lm, rounded_weights)

    with while_sampling(use_rounded_weights):
        yield


SECOND_FAULT = Fault(
    cause="imprecise-logp",
    mechanism="the sampler's weights are rounded to 8 bits",
    inject=round_sampler_weights,
    visible_at_start=True,
)
