"""Samples one token per row of logits: temperature, filters, inverse CDF.

Filters (`model/token_filters.py`) apply to the tempered distribution; the remaining probabilities
are renormalized. The returned log-prob is that of the distribution actually sampled from.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from klinic.errors import LogitsError
from klinic.model.determinism import cumulative_sum
from klinic.model.token_filters import TokenFilters, restrict_logp

CHUNK_LOGITS = 2**19  # logits per chunk on a CPU: intermediates stay in its cache


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(TokenFilters):
    """Temperature and filters; a temperature of 0 is greedy decoding."""

    temperature: float = 1.0


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """One sampled token per row, and its log-prob under the sampling distribution."""

    token_ids: Int[Tensor, "R"]
    logp: Float[Tensor, "R"]


def sample_tokens(
    logits: Float[Tensor, "R V"], uniform: Float[Tensor, "R"], params: SamplingParams
) -> SampledTokens:
    """Sample one token per row with the given uniform numbers."""
    num, outcomes = logits.shape
    size = max(1, CHUNK_LOGITS // outcomes) if logits.device.type == "cpu" else num
    chunks = zip(torch.split(logits, size), torch.split(uniform, size), strict=True)
    parts = [_sample_chunk(some, numbers, params) for some, numbers in chunks]
    return SampledTokens(
        token_ids=torch.cat([part.token_ids for part in parts]),
        logp=torch.cat([part.logp for part in parts]),
    )


def _sample_chunk(
    logits: Float[Tensor, "R V"], uniform: Float[Tensor, "R"], params: SamplingParams
) -> SampledTokens:
    logp = torch.log_softmax(
        logits if params.temperature in (0, 1) else logits / params.temperature, -1
    )
    # log_softmax makes a bad row NaN entirely; a -inf only excludes one token
    if bool(logp[:, 0].isnan().any()):
        raise LogitsError(
            "the policy's logits are not finite: an update made some of its weights NaN or "
            "infinite. Lower learner.learning_rate and resume from an earlier checkpoint."
        )
    if params.temperature == 0:
        token_ids = logits.argmax(-1)
        return SampledTokens(token_ids=token_ids, logp=_gather_logp(logp, token_ids))
    if params.has_filters:
        logp = restrict_logp(logp, params)
    token_ids = inverse_cdf(logp, uniform)
    return SampledTokens(token_ids=token_ids, logp=_gather_logp(logp, token_ids))


def inverse_cdf(logp: Float[Tensor, "R V"], uniform: Float[Tensor, "R"]) -> Int[Tensor, "R"]:
    """Return the token whose CDF interval contains the uniform number.

    Computed in float64; a token of probability 0 has an empty interval and is never returned.
    """
    cdf = cumulative_sum(logp.to(torch.float64, copy=True).exp_())
    total = cdf[:, -1]
    point = torch.minimum(uniform.double() * total, torch.nextafter(total, -torch.ones_like(total)))
    return torch.searchsorted(cdf, point[:, None], right=True)[:, 0]


def _gather_logp(logp: Tensor, token_ids: Tensor) -> Tensor:
    return logp.gather(-1, token_ids[:, None])[:, 0]
