"""Measures each named KL estimator: promised gradient, measured gradient, verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import torch
from torch import Tensor

from klinic.maths.importance import ImportanceSampling
from klinic.maths.kl_estimators import ESTIMATORS, Estimator, Gradient
from klinic.maths.kl_inputs import KLInputs
from klinic.verify.expectation import (
    UNCAPPED,
    EnumeratedPairs,
    GradientMoments,
    gradient_moments,
    mean_gradient,
)
from klinic.verify.extremes import Extremes, scan_term
from klinic.verify.identify import (
    TOLERANCE,
    GradientIdentity,
    Targets,
    deviation_from_target,
    identify_gradient,
    relative_norm,
    worst_error,
)
from klinic.verify.targets import sequence_kl, target_gradients
from klinic.verify.toy_policies import World, make_world
from klinic.verify.world_range import WorldRange, measure_range

Verdict = Literal["correct", "wrong", "conditional"]

# Promised gradients without a public name; each is compared with an exact sum all the same.
UNNAMED_IDENTITIES = {
    "topk": "bucket_token",
    "k3_reversed": "half_chi_square",
    "abs": "sign_token",
    "exp_k1_reward": "exp_k1_cost",
}
LOWER_BOUND_IDENTITY = "bucket_token"
OFF_POLICY_IDENTITIES = {"reverse_token_off_policy", "bucket_token_off_policy"}
# not functions of one token's log-probs
WHOLE_VOCABULARY_ESTIMATORS = {
    "exact",
    "topk",
    "sequence",
}
SAMPLER_DRIFTS = (0.1, 0.3, 0.6, 1.0)


@dataclass(frozen=True, kw_only=True)
class CapBias:
    """Bias from capping the weights on completions of an older policy."""

    drift: float
    """Standard deviation of the change of the logits since sampling."""
    mean_log_ratio: float
    """Mean of |log policy - log sampler| per token, in nats."""
    bias: float
    """Change of the expected gradient by the cap, relative to the uncapped gradient."""


@dataclass(frozen=True, kw_only=True)
class EstimatorRow:
    """Measurements of one estimator. Biases are relative to the gradient of the sequence KL."""

    name: str
    kind: Literal["offered", "published"]
    gradient: Gradient
    identity: str
    """The exact sum that the expected gradient equals."""
    identity_error: float
    bias: float
    variance: float
    value_bias: float
    """Of the mean value, relative to the KL."""
    by_world: dict[str, dict[str, float]]
    over_worlds: WorldRange
    """The same over random worlds."""
    cap_bias: float
    cap_bias_by_drift: tuple[CapBias, ...]
    gradient_off_policy: Gradient
    bias_off_policy: float
    verdict: Verdict
    verdict_off_policy: Verdict
    extremes: Extremes | None
    sentence: str
    ok: bool


@dataclass(frozen=True, kw_only=True)
class WorldSet:
    """A family of worlds with their enumerated pairs and targets, shared by all estimators."""

    worlds: Sequence[World]
    world_pairs: Sequence[EnumeratedPairs]
    targets: Sequence[Targets]

    @classmethod
    def from_worlds(cls, worlds: Sequence[World]) -> "WorldSet":
        """Enumerate and score every pair, with the cap off."""
        return cls(
            worlds=worlds,
            world_pairs=[EnumeratedPairs.from_world(world) for world in worlds],
            targets=[target_gradients(world) for world in worlds],
        )

    @cached_property
    def term_moments(self) -> dict[str, list[GradientMoments]]:
        """The moments of every term in every world."""
        return {
            name: [gradient_moments(pairs, estimator.term) for pairs in self.world_pairs]
            for name, estimator in ESTIMATORS.items()
        }


def measure_estimator(
    estimator: Estimator, on_policy: WorldSet, off_policy: WorldSet, random: WorldSet
) -> EstimatorRow:
    """Measure one estimator in all worlds and compare it with its promise."""
    moments_on_policy, moments_off_policy = (
        on_policy.term_moments[estimator.name],
        off_policy.term_moments[estimator.name],
    )
    identity = identify_gradient(moments_on_policy, on_policy.targets)
    identity_off_policy = identify_gradient(moments_off_policy, off_policy.targets)
    by_world = {
        world.name: _relative_moments(world, moment, target)
        for world, moment, target in zip(
            on_policy.worlds, moments_on_policy, on_policy.targets, strict=True
        )
    }
    biases_off = [
        relative_norm(moment.gradient - target["reverse_sequence"], target)
        for moment, target in zip(moments_off_policy, off_policy.targets, strict=True)
    ]
    by_drift = measure_cap_biases(estimator)
    error = worst_error([promise_error(estimator, on_policy), promise_error(estimator, random)])
    verdict = _on_policy_verdict(identity)
    return EstimatorRow(
        name=estimator.name,
        kind=estimator.kind,
        gradient=identity.gradient,
        identity=identity.target or "none",
        identity_error=error,
        **by_world["far"],
        by_world=by_world,
        over_worlds=measure_range(
            random.term_moments[estimator.name],
            [target["reverse_sequence"] for target in random.targets],
        ),
        cap_bias=worst_error(entry.bias for entry in by_drift),
        cap_bias_by_drift=by_drift,
        gradient_off_policy=identity_off_policy.gradient,
        bias_off_policy=worst_error(biases_off),
        verdict=verdict,
        verdict_off_policy=_off_policy_verdict(verdict, identity_off_policy),
        extremes=None
        if estimator.name in WHOLE_VOCABULARY_ESTIMATORS
        else scan_estimator(estimator),
        sentence=estimator.sentence,
        ok=error < TOLERANCE and identity.target == promised_identity(estimator),
    )


def promised_identity(estimator: Estimator) -> str:
    """Return the exact sum that the expected gradient is promised to equal."""
    return UNNAMED_IDENTITIES.get(estimator.name, estimator.gradient.value)


def promise_error(estimator: Estimator, world_set: WorldSet) -> float:
    """Return the deviation of the expected gradients from the promised ones."""
    moments_on_policy = world_set.term_moments[estimator.name]
    return deviation_from_target(promised_identity(estimator), moments_on_policy, world_set.targets)


def measure_cap_biases(estimator: Estimator) -> tuple[CapBias, ...]:
    """Return the bias of the default cap in the expected gradient, by drift of the sampler."""
    return tuple(_measure_cap_bias(estimator, drift) for drift in SAMPLER_DRIFTS)


def scan_estimator(estimator: Estimator) -> Extremes:
    """Scan a term on policy, each token as a completion of its own."""

    def token_term(logp: Tensor, logp_ref: Tensor) -> Tensor:
        terms: Tensor = estimator.term(one_token_rows(logp, logp_ref))
        return terms

    return scan_term(token_term)


def one_token_rows(logp: Tensor, logp_ref: Tensor) -> KLInputs:
    """Return the tokens as on-policy completions of one token each."""
    return KLInputs(
        group=torch.arange(len(logp)),
        row_offsets=torch.arange(len(logp) + 1),
        logp=logp,
        logp_old=logp.detach(),
        logp_sampler=logp.detach(),
        logp_ref=logp_ref,
        loss_mask=torch.ones(len(logp), dtype=torch.bool),
    )


def _relative_moments(world: World, moment: GradientMoments, target: Targets) -> dict[str, float]:
    exact = float(sequence_kl(world, world.theta))
    sequence_gradient = target["reverse_sequence"]
    return {
        "bias": relative_norm(moment.gradient - sequence_gradient, target),
        "variance": moment.variance / float(sequence_gradient @ sequence_gradient),
        "value_bias": moment.value / exact - 1,
    }


def drifted_world(drift: float) -> World:
    """Return the world in which the effect of a sampler's drift is measured."""
    return make_world("drifted", seed=8, drift=1.0, sampler_drift=drift)


@cache
def _drifted_pairs(drift: float, importance_sampling: ImportanceSampling) -> EnumeratedPairs:
    return EnumeratedPairs.from_world(drifted_world(drift), importance_sampling=importance_sampling)


def _measure_cap_bias(estimator: Estimator, drift: float) -> CapBias:
    uncapped, capped = _drifted_pairs(drift, UNCAPPED), _drifted_pairs(drift, ImportanceSampling())
    uncapped_gradient, capped_gradient = (
        mean_gradient(pairs, estimator.term) for pairs in (uncapped, capped)
    )
    scale = max(float(uncapped_gradient.norm()), 1e-300)
    return CapBias(
        drift=drift,
        mean_log_ratio=uncapped.mean_log_ratio,
        bias=float((capped_gradient - uncapped_gradient).norm()) / scale,
    )


def _on_policy_verdict(identity: GradientIdentity) -> Verdict:
    if identity.target in {"reverse_token", "reverse_sequence", LOWER_BOUND_IDENTITY}:
        return "correct"
    return "conditional" if identity.target in {"forward_token", "forward_sequence"} else "wrong"


def _off_policy_verdict(on_policy: Verdict, identity: GradientIdentity) -> Verdict:
    if identity.target in OFF_POLICY_IDENTITIES:
        return "correct"
    return "conditional" if on_policy == "correct" else "wrong"
