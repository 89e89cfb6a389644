"""unnormalised-logp: the sampler normalises over a part of the vocabulary.

Second mechanism: it reports logits, less their mean, instead of log-probs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.sampler import decoding

SKIPPED_FRACTION = {Severity.MILD: 0.1, Severity.NORMAL: 0.5}  # of the vocabulary
LOGIT_FRACTION = {Severity.MILD: 0.5, Severity.NORMAL: 1.0}  # of the logit that is reported


@contextmanager
def skip_vocabulary_shards(severity: Severity) -> Iterator[None]:
    """Leave the first ids out of the logsumexp."""

    def draw_unnormalised(real: Any, logits: Any, uniform: Any, params: Any) -> Any:
        samples = real(logits, uniform, params)
        if params.temperature == 0:  # greedy evaluation
            return samples
        scaled = logits / params.temperature
        num_skipped = int(SKIPPED_FRACTION[severity] * logits.shape[-1])
        total = torch.logsumexp(scaled[..., num_skipped:], -1)
        return replace(samples, logp=_chosen(scaled, samples) - total)

    with patch_attribute(decoding, "sample_tokens", draw_unnormalised):
        yield


def _chosen(logits: Any, samples: Any) -> Any:
    return logits.gather(-1, samples.token_ids[:, None])[:, 0]


FAULT = Fault(
    cause="unnormalised-logp",
    mechanism="a part of the vocabulary is missing in the normaliser",
    inject=skip_vocabulary_shards,
    visible_at_start=True,
)


@contextmanager
def report_logits(severity: Severity) -> Iterator[None]:
    """Report centred logits."""

    def draw_logits(real: Any, logits: Any, uniform: Any, params: Any) -> Any:
        samples = real(logits, uniform, params)
        if params.temperature == 0:
            return samples
        centred = logits - logits.mean(-1, keepdim=True)
        return replace(samples, logp=LOGIT_FRACTION[severity] * _chosen(centred, samples))

    with patch_attribute(decoding, "sample_tokens", draw_logits):
        yield


SECOND_FAULT = Fault(
    cause="unnormalised-logp",
    mechanism="logits are reported as log-probs",
    inject=report_logits,
    visible_at_start=True,
)
