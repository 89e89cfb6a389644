"""Identities that klinic's own terms must satisfy, each with its measured error."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from klinic.maths import kl_terms
from klinic.maths.advantage import ADVANTAGES
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.verify.coefficient_meaning import (
    AggregationRow,
    pair_rewards,
    policy_gradient,
    random_completion_rewards,
    reward_gradient,
)
from klinic.verify.estimators import WorldSet, one_token_rows, promise_error, promised_identity
from klinic.verify.expectation import EnumeratedPairs, gradient_moments
from klinic.verify.identify import deviation_from_target, relative_norm, worst_error
from klinic.verify.identity_check import IdentityCheck
from klinic.verify.targets import finite_difference_gradient, sequence_kl, target_gradients
from klinic.verify.toy_policies import make_world

FINITE_DIFFERENCE_TOLERANCE = (
    1e-8  # central differences with a step of 1e-5 have an error of about 1e-10
)
FAR_DISTANCE, MAX_DISTANCE = 60.0, 200.0
OFFERED_ESTIMATORS = [estimator for estimator in ESTIMATORS.values() if estimator.kind == "offered"]


def check_identities(
    on_policy: WorldSet, off_policy: WorldSet, aggregations: list[AggregationRow]
) -> list[IdentityCheck]:
    """Return every identity with its error."""
    return [
        *_check_promises(on_policy),
        _check_finite_difference(on_policy),
        *_check_mean_values(on_policy),
        *_check_off_policy(off_policy),
        _check_zero_at_reference(),
        _check_equal_per_sample(on_policy),
        *_check_constant_denominator(aggregations),
        _check_reward_gradient(),
        _check_equal_rewards(),
        *_check_far_from_reference(),
    ]


def _check_promises(world_set: WorldSet) -> list[IdentityCheck]:
    return [
        IdentityCheck(
            name=f"gradient of {name}",
            statement=f"the expected gradient of {name} is {promised_identity(estimator)}",
            error=promise_error(estimator, world_set),
        )
        for name, estimator in ESTIMATORS.items()
    ]


def _check_finite_difference(world_set: WorldSet) -> IdentityCheck:
    errors = [
        relative_norm(finite_difference_gradient(world) - target["reverse_sequence"], target)
        for world, target in zip(world_set.worlds, world_set.targets, strict=True)
    ]
    return IdentityCheck(
        name="finite differences",
        statement="the gradient of the sequence KL agrees with finite differences",
        error=worst_error(errors),
        tolerance=FINITE_DIFFERENCE_TOLERANCE,
    )


def _check_mean_values(world_set: WorldSet) -> list[IdentityCheck]:
    names = ("unbiased", "exact", "sequence", "k1", "k3", "k3_plus", "k3_ratio", "k1_reward")
    return [
        IdentityCheck(
            name=f"value of {name}",
            statement=f"the mean value of {name} is KL(policy || reference)",
            error=worst_error(
                abs(moment.value / float(sequence_kl(world, world.theta)) - 1)
                for world, moment in zip(
                    world_set.worlds, world_set.term_moments[name], strict=True
                )
            ),
        )
        for name in names
    ]


def _check_off_policy(world_set: WorldSet) -> list[IdentityCheck]:
    promised = {
        "unbiased": "reverse_token_off_policy",
        "exact": "reverse_token_off_policy",
        "k3_ratio": "reverse_token_off_policy",
        "topk": "bucket_token_off_policy",
        "k1": "away_from_sampler",
    }
    return [
        IdentityCheck(
            name=f"gradient of {name}, off policy",
            statement=f"on completions of an older policy the gradient of {name} is {target}",
            error=deviation_from_target(target, world_set.term_moments[name], world_set.targets),
        )
        for name, target in promised.items()
    ]


def _check_zero_at_reference() -> IdentityCheck:
    world = make_world("far", seed=1, drift=1.2)
    scale = float(target_gradients(world)["reverse_sequence"].norm())
    pairs = EnumeratedPairs.from_world(replace(world, theta_ref=world.theta))
    gradient_norms = [
        float(gradient_moments(pairs, estimator.term).gradient.norm())
        for estimator in OFFERED_ESTIMATORS
    ]
    return IdentityCheck(
        name="zero at the reference",
        statement="at policy = reference every offered term has expected gradient 0",
        error=worst_error(gradient_norms) / scale,
    )


def _check_equal_per_sample(world_set: WorldSet) -> IdentityCheck:
    """Check that unbiased, k2 and k3_ratio have equal gradients on every on-policy sample."""
    errors = []
    for pairs in world_set.world_pairs:
        first, *rest = (
            pairs.pair_gradients(term(pairs.inputs))
            for term in (kl_terms.unbiased, kl_terms.k2, kl_terms.k3_ratio)
        )
        errors += [float((first - other).abs().max() / first.abs().max()) for other in rest]
    return IdentityCheck(
        name="one gradient, three names",
        statement="on policy, unbiased, k2 and k3_ratio have equal gradients on every sample",
        error=worst_error(errors),
    )


def _check_constant_denominator(aggregations: list[AggregationRow]) -> list[IdentityCheck]:
    return [
        IdentityCheck(
            name=f"constant denominator, {row.estimator}",
            statement=f"a constant denominator only scales the gradient of {row.estimator}",
            error=row.deviation if row.deviation is not None else math.nan,
        )
        for row in aggregations
        if row.aggregation == "constant"
    ]


def _check_reward_gradient() -> IdentityCheck:
    world = make_world("eos", seed=3, drift=1.2, ends_early=True)
    reward = random_completion_rewards(world)
    pairs, goal = (
        EnumeratedPairs.from_world(world),
        reward_gradient(world, reward),
    )
    gradient = -policy_gradient(pairs, pair_rewards(reward), "leave_one_out")
    return IdentityCheck(
        name="policy term",
        statement="with leave-one-out advantages the policy term is the gradient of the reward",
        error=float((gradient - goal).norm() / goal.norm()),
    )


def _check_equal_rewards() -> IdentityCheck:
    """Check that groups of equal rewards have no policy gradient, so that only the KL remains."""
    world = make_world("eos", seed=3, drift=1.2, ends_early=True)
    pairs = EnumeratedPairs.from_world(world)
    equal = torch.full((world.completion_pairs.num_rows,), 0.7, dtype=torch.float64)
    kl_gradient_norm = float(target_gradients(world)["reverse_sequence"].norm())
    compared = [name for name in ADVANTAGES if name != "none"]
    gradient_norms = [float(policy_gradient(pairs, equal, name).norm()) for name in compared]
    return IdentityCheck(
        name="equal rewards",
        statement="groups of equal rewards do not change the KL term, for every advantage",
        error=worst_error(gradient_norms) / kl_gradient_norm,
    )


def _check_far_from_reference() -> list[IdentityCheck]:
    names = ("unbiased", "k2", "k3_ratio")
    return [
        IdentityCheck(
            name=f"{name} at d = {FAR_DISTANCE:.0f}",
            statement=(
                f"in float32 the pull of {name} at d = {FAR_DISTANCE:.0f} is {FAR_DISTANCE:.0f}"
            ),
            error=abs(float(_float32_pull(name, FAR_DISTANCE)) / -FAR_DISTANCE - 1),
            tolerance=1e-6,  # float32 has 7 digits
        )
        for name in names
    ] + [
        IdentityCheck(
            name=f"unbiased at d = {MAX_DISTANCE:.0f}",
            statement=f"in float32 unbiased is finite at d = {MAX_DISTANCE:.0f}, with a pull of d",
            error=abs(float(_float32_pull("unbiased", MAX_DISTANCE)) / -MAX_DISTANCE - 1),
            tolerance=1e-6,
        )
    ]


def _float32_pull(name: str, d: float) -> Tensor:
    """Return the float32 derivative of a term in logp at d = log ref - log policy."""
    logp = torch.tensor([-d - 0.5], requires_grad=True)
    term = ESTIMATORS[name].term(one_token_rows(logp, torch.tensor([-0.5])))
    (pull,) = torch.autograd.grad(term.sum(), logp)
    return pull
