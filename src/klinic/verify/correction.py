"""Measures each mode of importance weights on completions of an older policy.

The policy term and the KL terms are compared with the gradients that they have on completions of
the policy itself: without a cap, where sequence weights must reach them exactly, and with the
default cap, where every mode has a bias that grows with the drift of the sampler.
"""

import math
from dataclasses import dataclass, replace
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from klinic.maths.advantage import leave_one_out
from klinic.maths.importance import ImportanceSampling, Mode, importance_weight
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.maths.kl_inputs import KLInputs
from klinic.maths.surrogate import PolicyInputs, clipped_surrogate
from klinic.verify.coefficient_meaning import (
    pair_rewards,
    random_completion_rewards,
    reward_gradient,
)
from klinic.verify.estimators import SAMPLER_DRIFTS, WorldSet, drifted_world
from klinic.verify.expectation import UNCAPPED, EnumeratedPairs, Term, gradient_moments
from klinic.verify.identify import Targets, worst_error
from klinic.verify.identity_check import IdentityCheck
from klinic.verify.toy_policies import World

MODES: tuple[Mode, ...] = get_args(Mode)
POLICY = "policy"
KL_TARGETS = {
    "unbiased": "reverse_token",
    "exact": "reverse_token",
    "topk": "bucket_token",
    "sequence": "reverse_sequence",
}
"""The gradient of each offered KL term on policy."""
SETTINGS: tuple[tuple[Mode | None, str], ...] = (
    (None, POLICY),
    *((mode, term) for mode in MODES for term in (POLICY, *KL_TARGETS)),
)
"""Modes with the terms that they weight; None leaves the policy term without weights."""
UncappedBiases = dict[tuple[Mode | None, str], float]


@dataclass(frozen=True, kw_only=True)
class DriftedGradient:
    """The expected gradient on completions of a drifted sampler, under the default cap."""

    drift: float
    """Standard deviation of the change of the logits since sampling."""
    mean_log_ratio: float
    """Mean of |log policy - log sampler| per token, in nats."""
    bias: float
    """Distance from the gradient on policy, relative to it."""
    variance: float
    """Of one completion's gradient, relative to the square of the gradient on policy."""


@dataclass(frozen=True, kw_only=True)
class CorrectionRow:
    """One term of the loss under one mode; `none` leaves the policy term without weights."""

    mode: str
    term: str
    uncapped_bias: float
    """Distance from the gradient on policy without a cap, the largest of the off-policy worlds."""
    by_drift: tuple[DriftedGradient, ...]


def measure_uncapped_biases(off_policy: WorldSet) -> UncappedBiases:
    """Return the largest bias over the worlds, without a cap, of every term under every mode."""
    return {(mode, term): _uncapped_bias(off_policy, term, mode) for mode, term in SETTINGS}


def measure_corrections(uncapped_biases: UncappedBiases) -> list[CorrectionRow]:
    """Return every term of the loss under every mode."""
    drifted = WorldSet.from_worlds([drifted_world(drift) for drift in SAMPLER_DRIFTS])
    return [
        CorrectionRow(
            mode=mode or "none",
            term=term,
            uncapped_bias=bias,
            by_drift=_measure_drifts(drifted, term, mode),
        )
        for (mode, term), bias in uncapped_biases.items()
    ]


def check_corrections(off_policy: WorldSet, uncapped_biases: UncappedBiases) -> list[IdentityCheck]:
    """Return the identities of uncapped weights: sequence weights reach the gradient on policy."""
    token_errors = [
        float((gradient - target).norm() / target.norm())
        for pairs in off_policy.world_pairs
        for target in [token_corrected_gradient(pairs.world)]
        for gradient in [policy_term_gradient(pairs, UNCAPPED)]
    ]
    return [
        *(
            IdentityCheck(
                name=f"{term} under {mode}",
                statement=f"without a cap, {mode} gives the {term} term its gradient on policy",
                error=bias,
            )
            for (mode, term), bias in uncapped_biases.items()
            if mode is not None and ImportanceSampling(mode=mode).by_sequence
        ),
        IdentityCheck(
            name="policy under token_truncate",
            statement="without a cap, token weights correct each token and not its prefix",
            error=worst_error(token_errors),
        ),
    ]


def _uncapped_bias(off_policy: WorldSet, term: str, mode: Mode | None) -> float:
    sampling = None if mode is None else ImportanceSampling(mode=mode, cap=math.inf)
    return worst_error(
        _bias_and_variance(pairs, targets, term, sampling)[0]
        for pairs, targets in zip(off_policy.world_pairs, off_policy.targets, strict=True)
    )


def policy_term_gradient(
    pairs: EnumeratedPairs, sampling: ImportanceSampling | None
) -> Float[Tensor, "P"]:
    """Return the expected gradient of the policy term."""
    return gradient_moments(pairs, _term(pairs.world, POLICY, sampling)).gradient


def token_corrected_gradient(world: World) -> Float[Tensor, "P"]:
    """Return the gradient of minus the expected reward if one token at a time is the policy's.

    Prefix and continuation are the sampler's: the gradient of uncapped token weights.
    """
    completions, reward = world.completions, random_completion_rewards(world)
    theta = world.theta.clone().requires_grad_()

    def token_logp(parameters: Tensor) -> Tensor:
        return world.prefix_log_probs(parameters)[completions.state, completions.token]

    row = completions.row_of_token
    others = world.completion_logp(world.theta_sampler)[row] - token_logp(world.theta_sampler)
    expected = ((others + token_logp(theta)).exp() * reward[row]).sum()
    (gradient,) = torch.autograd.grad(-expected, theta)
    return gradient


def _measure_drifts(drifted: WorldSet, term: str, mode: Mode | None) -> tuple[DriftedGradient, ...]:
    sampling = None if mode is None else ImportanceSampling(mode=mode)
    rows = []
    for drift, pairs, targets in zip(
        SAMPLER_DRIFTS, drifted.world_pairs, drifted.targets, strict=True
    ):
        bias, variance = _bias_and_variance(pairs, targets, term, sampling)
        rows.append(
            DriftedGradient(
                drift=drift,
                mean_log_ratio=pairs.mean_log_ratio,
                bias=bias,
                variance=variance,
            )
        )
    return tuple(rows)


def _bias_and_variance(
    pairs: EnumeratedPairs, targets: Targets, term: str, sampling: ImportanceSampling | None
) -> tuple[float, float]:
    world = pairs.world
    target = (
        -reward_gradient(world, random_completion_rewards(world))
        if term == POLICY
        else targets[KL_TARGETS[term]]
    )
    moments = gradient_moments(pairs, _term(world, term, sampling))
    norm = float(target.norm())
    return float((moments.gradient - target).norm()) / norm, moments.variance / norm**2


def _term(world: World, name: str, sampling: ImportanceSampling | None) -> Term:
    """Return a term of the loss under a mode and cap, as the learner weights it."""
    if name == POLICY:
        reward_of_row = pair_rewards(random_completion_rewards(world))
        return lambda inputs: _policy_term(inputs, reward_of_row, sampling)
    assert sampling is not None  # noqa: S101 - only the policy term can be without weights
    estimator = ESTIMATORS[name]
    return lambda inputs: estimator.term(replace(inputs, importance_sampling=sampling))


def _policy_term(
    inputs: KLInputs, reward_of_row: Tensor, sampling: ImportanceSampling | None
) -> Tensor:
    """Return the policy term of the first update on a batch: logp_old is the learner's."""
    logp_old = inputs.logp.detach()
    terms: Tensor = clipped_surrogate(
        PolicyInputs(
            advantage=leave_one_out(reward_of_row, inputs.group),
            row_offsets=inputs.row_offsets,
            logp=inputs.logp,
            logp_old=logp_old,
            loss_mask=inputs.loss_mask,
        )
    )
    if sampling is None:
        return terms
    weight: Tensor = importance_weight(
        sampling,
        logp=logp_old,
        logp_sampler=inputs.logp_sampler,
        loss_mask=inputs.loss_mask,
        row_offsets=inputs.row_offsets,
    )
    return weight * terms
