"""Monte Carlo check of the direction of k3 = exp(ref - policy) - (ref - policy) - 1.

Samples tokens from the policy (`measure_direction`) or from an older policy
(`measure_importance_sampling`), averages the estimators, and compares the averages with the KL
summed over the vocabulary. Each average also has its exact limit, a sum over the vocabulary:

    k3           KL(policy || reference)
    k3 reversed  chi-square(policy || reference) - KL(policy || reference)

so the error of the reversed form is chi-square minus twice the KL. On tokens of an older policy
both have these means only when weighted by the ratio policy / sampler.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from jaxtyping import Float, Int
from torch import Tensor

from klinic.maths import kl
from klinic.maths.ratio import token_ratio
from klinic.model.determinism import initialize_vml_kernels
from klinic.verify.identify import TOLERANCE

VOCAB_SIZE = 64
NUM_SAMPLES = 100_000
SHIFTS = (0.3, 1.0, 2.0, 4.0, 6.0)  # distance of the policy's logits from the reference's
SAMPLER_SHIFT = 0.5

VocabVector = Float[Tensor, "V"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An average over sampled tokens, and its exact limit."""

    name: str
    monte_carlo: float
    expected: float
    """The exact mean, summed over the vocabulary."""
    error: float
    """Of the average, against the KL."""
    right: bool
    """Whether the exact mean is the KL."""


@dataclass(frozen=True, kw_only=True)
class DistanceEstimates:
    """All estimates at one distance between policy and reference."""

    shift: float
    kl: float
    chi_square: float
    reversed_error: float
    """chi-square - 2 KL: the exact error of the reversed form."""
    estimates: tuple[Estimate, ...]


@dataclass(frozen=True, kw_only=True)
class _SampledCase:
    shift: float
    logp: VocabVector
    logp_ref: VocabVector
    logp_sampler: VocabVector
    tokens: Int[Tensor, "samples"]

    def estimate_kl(self, name: str, values: VocabVector, *, weighted: bool) -> Estimate:
        if weighted:
            values = values * token_ratio(logp=self.logp, logp_old=self.logp_sampler)
        exact = float(kl.exact(logp_p=self.logp, logp_q=self.logp_ref))
        average = float(values[self.tokens].mean())
        expected = float((self.logp_sampler.exp() * values).sum())
        return Estimate(
            name=name,
            monte_carlo=average,
            expected=expected,
            error=abs(average - exact),
            right=abs(expected - exact) < TOLERANCE * max(1.0, exact),
        )


def measure_direction() -> list[DistanceEstimates]:
    """Return k3 and its reversed form on tokens of the policy, at increasing distance."""
    return [
        _estimate_distance(_make_case(shift, sampler_shift=0.0), off_policy=False)
        for shift in SHIFTS
    ]


def measure_importance_sampling() -> list[DistanceEstimates]:
    """Return both forms on tokens of an older policy, with and without the importance ratio."""
    return [
        _estimate_distance(_make_case(shift, sampler_shift=SAMPLER_SHIFT), off_policy=True)
        for shift in SHIFTS
    ]


def all_as_expected(distances: list[DistanceEstimates]) -> bool:
    """Return whether exactly the expected estimates converge to the KL."""
    return all(
        estimate.right == ("reversed" not in estimate.name and "unweighted" not in estimate.name)
        for distance in distances
        for estimate in distance.estimates
    )


def _make_case(shift: float, *, sampler_shift: float) -> _SampledCase:
    initialize_vml_kernels()
    rng = torch.Generator().manual_seed(0)

    def sample_normal() -> VocabVector:
        return torch.randn(VOCAB_SIZE, generator=rng, dtype=torch.float64)

    base, policy_shift, sampler_noise = 2.5 * sample_normal(), sample_normal(), sample_normal()
    logits = base + shift * policy_shift
    logp_sampler = (logits + sampler_shift * sampler_noise).log_softmax(-1)
    return _SampledCase(
        shift=shift,
        logp=logits.log_softmax(-1),
        logp_ref=base.log_softmax(-1),
        logp_sampler=logp_sampler,
        tokens=torch.multinomial(logp_sampler.exp(), NUM_SAMPLES, replacement=True, generator=rng),
    )


def _estimate_distance(case: _SampledCase, *, off_policy: bool) -> DistanceEstimates:
    exact = float(kl.exact(logp_p=case.logp, logp_q=case.logp_ref))
    chi_square = float((2 * case.logp - case.logp_ref).exp().sum()) - 1
    k3 = kl.k3(logp_p=case.logp, logp_q=case.logp_ref)
    k3_reversed = kl.k3(logp_p=case.logp_ref, logp_q=case.logp)
    estimates = [
        case.estimate_kl("k3", k3, weighted=off_policy),
        case.estimate_kl("k3 reversed", k3_reversed, weighted=off_policy),
    ]
    if off_policy:
        estimates.append(case.estimate_kl("k3, unweighted", k3, weighted=False))
    if find_spec("trl"):
        estimates.append(_estimate_trl(case, exact))
    return DistanceEstimates(
        shift=case.shift,
        kl=exact,
        chi_square=chi_square,
        reversed_error=chi_square - 2 * exact,
        estimates=tuple(estimates),
    )


def _estimate_trl(case: _SampledCase, exact: float) -> Estimate:
    """Average TRL's KL expression over the same tokens, as completions of one token each."""
    from klinic.integrations.trl import mean_kl

    def mean_over_tokens(tokens: Int[Tensor, "tokens"]) -> float:
        logp, logp_ref, logp_old = (
            rows[tokens][:, None] for rows in (case.logp, case.logp_ref, case.logp_sampler)
        )
        return float(mean_kl(logp=logp, logp_ref=logp_ref, logp_old=logp_old))

    token_means = [mean_over_tokens(torch.tensor([token])) for token in range(VOCAB_SIZE)]
    expected = float(
        (case.logp_sampler.exp() * torch.tensor(token_means, dtype=torch.float64)).sum()
    )
    average = mean_over_tokens(case.tokens)
    return Estimate(
        name="TRL",
        monte_carlo=average,
        expected=expected,
        error=abs(average - exact),
        right=abs(expected - exact) < TOLERANCE * max(1.0, exact),
    )
