"""Measures each named KL estimator: promised gradient, measured gradient, verdict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import torch
from torch import Tensor

from klinic.maths.kl_estimators import ESTIMATORS, Estimator, Gradient
from klinic.maths.kl_inputs import RATIO_CAP, KLInputs
from klinic.verify.expectation import Drawn, Moments, mean_gradient, moments
from klinic.verify.extremes import Extremes, scan
from klinic.verify.identify import (
    TOLERANCE,
    Identity,
    Targets,
    deviation,
    identify,
    relative,
    worst,
)
from klinic.verify.targets import sequence_kl, targets
from klinic.verify.world import World, make_world

Verdict = Literal["correct", "wrong", "conditional"]

# Promised gradients without a public name; each is compared with an exact sum all the same.
UNNAMED = {
    "topk": "bucket_token",
    "k3_reversed": "half_chi_square",
    "abs": "sign_token",
    "exp_k1_reward": "exp_k1_cost",
}
LOWER_BOUND = "bucket_token"
OFF_POLICY = {"reverse_token_off_policy", "bucket_token_off_policy"}
NEEDS_VOCABULARY = {"exact", "topk", "sequence"}  # not functions of one token's log-probs
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
class Row:
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
class Setting:
    """A family of worlds with their enumerated pairs and targets, shared by all estimators."""

    worlds: Sequence[World]
    drawn: Sequence[Drawn]
    targets: Sequence[Targets]

    @classmethod
    def of(cls, worlds: Sequence[World]) -> "Setting":
        """Enumerate and score every pair, with the cap off."""
        return cls(
            worlds=worlds,
            drawn=[Drawn.of(world, ratio_cap=math.inf) for world in worlds],
            targets=[targets(world) for world in worlds],
        )

    @cached_property
    def moments(self) -> dict[str, list[Moments]]:
        """The moments of every term in every world."""
        return {
            name: [moments(drawn, estimator.term) for drawn in self.drawn]
            for name, estimator in ESTIMATORS.items()
        }


def row(estimator: Estimator, on_policy: Setting, off_policy: Setting) -> Row:
    """Measure one estimator in all worlds and compare it with its promise."""
    here, there = on_policy.moments[estimator.name], off_policy.moments[estimator.name]
    found = identify(here, on_policy.targets)
    found_off = identify(there, off_policy.targets)
    by_world = {
        world.name: _figures(world, moment, target)
        for world, moment, target in zip(on_policy.worlds, here, on_policy.targets, strict=True)
    }
    biases_off = [
        relative(moment.gradient - target["reverse_sequence"], target)
        for moment, target in zip(there, off_policy.targets, strict=True)
    ]
    by_drift = cap_biases(estimator)
    error = promise_error(estimator, on_policy)
    verdict = _verdict(found)
    return Row(
        name=estimator.name,
        kind=estimator.kind,
        gradient=found.gradient,
        identity=found.target or "none",
        identity_error=error,
        **by_world["far"],
        by_world=by_world,
        cap_bias=worst(entry.bias for entry in by_drift),
        cap_bias_by_drift=by_drift,
        gradient_off_policy=found_off.gradient,
        bias_off_policy=worst(biases_off),
        verdict=verdict,
        verdict_off_policy=_verdict_off_policy(verdict, found_off),
        extremes=None if estimator.name in NEEDS_VOCABULARY else extremes_of(estimator),
        sentence=estimator.sentence,
        ok=error < TOLERANCE and found.target == promised_identity(estimator),
    )


def promised_identity(estimator: Estimator) -> str:
    """Return the exact sum that the expected gradient is promised to equal."""
    return UNNAMED.get(estimator.name, estimator.gradient.value)


def promise_error(estimator: Estimator, setting: Setting) -> float:
    """Return the deviation of the expected gradients from the promised ones."""
    found = setting.moments[estimator.name]
    return deviation(promised_identity(estimator), found, setting.targets)


def cap_biases(estimator: Estimator) -> tuple[CapBias, ...]:
    """Return the bias of the default cap in the expected gradient, by drift of the sampler."""
    return tuple(_cap_bias(estimator, drift) for drift in SAMPLER_DRIFTS)


def extremes_of(estimator: Estimator) -> Extremes:
    """Scan a term on policy, each token as a completion of its own."""

    def term(logp: Tensor, logp_ref: Tensor) -> Tensor:
        terms: Tensor = estimator.term(one_token_rows(logp, logp_ref))
        return terms

    return scan(term)


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


def _figures(world: World, moment: Moments, target: Targets) -> dict[str, float]:
    exact = float(sequence_kl(world, world.theta))
    goal = target["reverse_sequence"]
    return {
        "bias": relative(moment.gradient - goal, target),
        "variance": moment.variance / float(goal @ goal),
        "value_bias": moment.value / exact - 1,
    }


@cache
def _drifted(drift: float, ratio_cap: float) -> Drawn:
    world = make_world("drifted", seed=8, drift=1.0, sampler_drift=drift)
    return Drawn.of(world, ratio_cap=ratio_cap)


def _cap_bias(estimator: Estimator, drift: float) -> CapBias:
    free, capped = _drifted(drift, math.inf), _drifted(drift, RATIO_CAP)
    without, with_cap = (mean_gradient(drawn, estimator.term) for drawn in (free, capped))
    log_ratio = (free.inputs.logp - free.inputs.logp_sampler).detach().abs()
    share = free.world.pair_probability[free.pair]
    scale = max(float(without.norm()), 1e-300)
    return CapBias(
        drift=drift,
        mean_log_ratio=float((share * log_ratio).sum() / share.sum()),
        bias=float((with_cap - without).norm()) / scale,
    )


def _verdict(found: Identity) -> Verdict:
    if found.target in {"reverse_token", "reverse_sequence", LOWER_BOUND}:
        return "correct"
    return "conditional" if found.target in {"forward_token", "forward_sequence"} else "wrong"


def _verdict_off_policy(on_policy: Verdict, found: Identity) -> Verdict:
    if found.target in OFF_POLICY:
        return "correct"
    return "conditional" if on_policy == "correct" else "wrong"
