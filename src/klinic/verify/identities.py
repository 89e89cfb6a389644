"""Identities that klinic's own terms must satisfy, each with its measured error."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from klinic.maths import kl_gradient
from klinic.maths.advantage import ADVANTAGES
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.verify.estimators import Setting, one_token_rows, promise_error, promised_identity
from klinic.verify.expectation import Drawn, moments
from klinic.verify.identify import TOLERANCE, deviation, relative, worst
from klinic.verify.meaning import (
    AggregationRow,
    policy_gradient,
    reward_gradient,
    reward_of_completions,
    rewards_of_rows,
)
from klinic.verify.targets import finite_difference, sequence_kl, targets
from klinic.verify.world import make_world

FINITE_DIFFERENCE = 1e-8  # central differences with a step of 1e-5 have an error of about 1e-10
FAR, FARTHEST = 60.0, 200.0
OFFERED = [estimator for estimator in ESTIMATORS.values() if estimator.kind == "offered"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One identity with its error and its tolerance."""

    name: str
    statement: str
    error: float
    tolerance: float = TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance; a NaN never is."""
        return self.error <= self.tolerance


def checks(on_policy: Setting, off_policy: Setting, averages: list[AggregationRow]) -> list[Check]:
    """Return every identity with its error."""
    return [
        *_promises(on_policy),
        _finite_difference(on_policy),
        *_values(on_policy),
        *_off_policy(off_policy),
        _zero_at_reference(),
        _same_per_sample(on_policy),
        *_constant_denominator(averages),
        _reward_gradient(),
        _equal_rewards(),
        *_far_from_reference(),
    ]


def _promises(setting: Setting) -> list[Check]:
    return [
        Check(
            name=f"gradient of {name}",
            statement=f"the expected gradient of {name} is {promised_identity(estimator)}",
            error=promise_error(estimator, setting),
        )
        for name, estimator in ESTIMATORS.items()
    ]


def _finite_difference(setting: Setting) -> Check:
    errors = [
        relative(finite_difference(world) - target["reverse_sequence"], target)
        for world, target in zip(setting.worlds, setting.targets, strict=True)
    ]
    return Check(
        name="finite differences",
        statement="the gradient of the sequence KL agrees with finite differences",
        error=worst(errors),
        tolerance=FINITE_DIFFERENCE,
    )


def _values(setting: Setting) -> list[Check]:
    names = ("unbiased", "exact", "sequence", "k1", "k3", "k3_plus", "k3_ratio", "k1_reward")
    return [
        Check(
            name=f"value of {name}",
            statement=f"the mean value of {name} is KL(policy || reference)",
            error=worst(
                abs(moment.value / float(sequence_kl(world, world.theta)) - 1)
                for world, moment in zip(setting.worlds, setting.moments[name], strict=True)
            ),
        )
        for name in names
    ]


def _off_policy(setting: Setting) -> list[Check]:
    promised = {
        "unbiased": "reverse_token_off_policy",
        "exact": "reverse_token_off_policy",
        "k3_ratio": "reverse_token_off_policy",
        "topk": "bucket_token_off_policy",
        "k1": "away_from_sampler",
    }
    return [
        Check(
            name=f"gradient of {name}, off policy",
            statement=f"on completions of an older policy the gradient of {name} is {target}",
            error=deviation(target, setting.moments[name], setting.targets),
        )
        for name, target in promised.items()
    ]


def _zero_at_reference() -> Check:
    world = make_world("far", seed=1, drift=1.2)
    scale = float(targets(world)["reverse_sequence"].norm())
    drawn = Drawn.of(replace(world, theta_ref=world.theta), ratio_cap=math.inf)
    found = [float(moments(drawn, estimator.term).gradient.norm()) for estimator in OFFERED]
    return Check(
        name="zero at the reference",
        statement="at policy = reference every offered term has expected gradient 0",
        error=worst(found) / scale,
    )


def _same_per_sample(setting: Setting) -> Check:
    """Check that unbiased, k2 and k3_ratio have equal gradients on every on-policy sample."""
    errors = []
    for drawn in setting.drawn:
        one, *others = (
            drawn.gradient_of_pairs(term(drawn.inputs))
            for term in (kl_gradient.unbiased, kl_gradient.k2, kl_gradient.k3_ratio)
        )
        errors += [float((one - other).abs().max() / one.abs().max()) for other in others]
    return Check(
        name="one gradient, three names",
        statement="on policy, unbiased, k2 and k3_ratio have equal gradients on every sample",
        error=worst(errors),
    )


def _constant_denominator(averages: list[AggregationRow]) -> list[Check]:
    return [
        Check(
            name=f"constant denominator, {row.estimator}",
            statement=f"a constant denominator only scales the gradient of {row.estimator}",
            error=row.deviation if row.deviation is not None else math.nan,
        )
        for row in averages
        if row.aggregation == "constant"
    ]


def _reward_gradient() -> Check:
    world = make_world("eos", seed=3, drift=1.2, ends_early=True)
    reward = reward_of_completions(world)
    drawn, goal = Drawn.of(world, ratio_cap=math.inf), reward_gradient(world, reward)
    found = -policy_gradient(drawn, rewards_of_rows(reward), "leave_one_out")
    return Check(
        name="policy term",
        statement="with leave-one-out advantages the policy term is the gradient of the reward",
        error=float((found - goal).norm() / goal.norm()),
    )


def _equal_rewards() -> Check:
    """Check that groups of equal rewards have no policy gradient, so that only the KL remains."""
    world = make_world("eos", seed=3, drift=1.2, ends_early=True)
    drawn = Drawn.of(world, ratio_cap=math.inf)
    equal = torch.full((world.pairs.num_rows,), 0.7, dtype=torch.float64)
    size = float(targets(world)["reverse_sequence"].norm())
    compared = [name for name in ADVANTAGES if name != "none"]
    policy = [float(policy_gradient(drawn, equal, name).norm()) for name in compared]
    return Check(
        name="equal rewards",
        statement="groups of equal rewards do not change the KL term, for every advantage",
        error=worst(policy) / size,
    )


def _far_from_reference() -> list[Check]:
    names = ("unbiased", "k2", "k3_ratio")
    return [
        Check(
            name=f"{name} at d = {FAR:.0f}",
            statement=f"in float32 the pull of {name} at d = {FAR:.0f} is {FAR:.0f}",
            error=abs(float(_pull(name, FAR)) / -FAR - 1),
            tolerance=1e-6,  # float32 has 7 digits
        )
        for name in names
    ] + [
        Check(
            name=f"unbiased at d = {FARTHEST:.0f}",
            statement=f"in float32 unbiased is finite at d = {FARTHEST:.0f}, with a pull of d",
            error=abs(float(_pull("unbiased", FARTHEST)) / -FARTHEST - 1),
            tolerance=1e-6,
        )
    ]


def _pull(name: str, d: float) -> Tensor:
    """Return the float32 derivative of a term in logp at d = log ref - log policy."""
    logp = torch.tensor([-d - 0.5], requires_grad=True)
    term = ESTIMATORS[name].term(one_token_rows(logp, torch.tensor([-0.5])))
    (pull,) = torch.autograd.grad(term.sum(), logp)
    return pull
