"""The gradients that a KL term can have in expectation, each as an exact sum.

Independent of `maths`: the targets are derivatives, by autograd in float64, of sums over all
completions or prefixes; finite differences check the sequence KL.
Write p for the policy, q for the reference, v_m(s) for the visits of prefix s under policy m.

    reverse_sequence           grad sum_y p(y) (log p(y) - log q(y))
    reverse_token              sum_s v_p(s) grad KL(p(.|s) || q(.|s)), v_p held fixed
    reverse_token_off_policy   the same with the visits of the sampler
    forward_token              sum_s v_p(s) grad KL(q(.|s) || p(.|s))
    forward_sequence           grad sum_y q(y) (log q(y) - log p(y))
    bucket_token, bucket_token_off_policy   KL of the two likeliest tokens and a rest bucket
    half_chi_square            sum_s v_p(s) grad sum_a p^2 / q / 2
    sign_token                 sum_s v_p(s) sum_a p sign(log p - log q) grad log p
    exp_k1_cost                sum_y p(y) C(y) grad log p(y), C = sum_t (p/q) log(p/q)
    away_from_sampler          minus grad sum_y m(y) (log m(y) - log p(y)), m the sampler
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from klinic.verify.toy_policies import World

TOP_K = 2  # of 4: enough to leave a bucket

Vector = Float[Tensor, "P"]
PrefixSum = Callable[[Tensor, Tensor], Tensor]
"""Maps the log-probs of policy and reference at every prefix to one number per prefix."""


def sequence_kl(world: World, theta: Vector) -> Tensor:
    """Return KL(policy || reference) of whole completions."""
    logp, logp_ref = world.completion_logp(theta), world.completion_logp(world.theta_ref)
    return (logp.exp() * (logp - logp_ref)).sum()


def target_gradients(world: World) -> dict[str, Vector]:
    """Return every target gradient of a world."""
    policy_visits = visit_counts(world, world.theta)
    sampler_visits = visit_counts(world, world.theta_sampler)
    logp_ref = world.completion_logp(world.theta_ref)
    logp_sampler = world.completion_logp(world.theta_sampler)

    def prefix_gradient(visits: Tensor, kl: PrefixSum) -> Vector:
        return _theta_gradient(
            world, lambda theta: sum_over_prefixes(world, kl, theta=theta, visits=visits)
        )

    def completion_gradient(weight: Tensor) -> Vector:
        return _theta_gradient(world, lambda theta: (weight * world.completion_logp(theta)).sum())

    completion_probability = world.completion_logp(world.theta).exp()
    return {
        "reverse_sequence": _theta_gradient(world, lambda theta: sequence_kl(world, theta)),
        "reverse_token": prefix_gradient(policy_visits, reverse_kl),
        "reverse_token_off_policy": prefix_gradient(sampler_visits, reverse_kl),
        "forward_token": prefix_gradient(policy_visits, forward_kl),
        "forward_sequence": completion_gradient(-logp_ref.exp()),
        "bucket_token": prefix_gradient(policy_visits, bucketed_top_k_kl),
        "bucket_token_off_policy": prefix_gradient(sampler_visits, bucketed_top_k_kl),
        "half_chi_square": prefix_gradient(policy_visits, half_chi_square),
        "sign_token": prefix_gradient(policy_visits, sign_surrogate),
        "exp_k1_cost": completion_gradient(completion_probability * _exp_k1_cost(world)),
        "away_from_sampler": completion_gradient(logp_sampler.exp()),
    }


def sum_over_prefixes(
    world: World, kl: PrefixSum, *, theta: Vector | None = None, visits: Tensor | None = None
) -> Tensor:
    """Return the sum over all prefixes of visits times kl(log policy, log reference)."""
    theta = world.theta if theta is None else theta
    visits = visit_counts(world, theta) if visits is None else visits
    ref = world.prefix_log_probs(world.theta_ref)
    return (visits * kl(world.prefix_log_probs(theta), ref)).sum()


def finite_difference_gradient(world: World, *, width: float = 1e-5) -> Vector:
    """Return the gradient of the sequence KL by central differences, without autograd."""
    steps = torch.eye(len(world.theta), dtype=torch.float64) * width
    return torch.stack(
        [
            (sequence_kl(world, world.theta + step) - sequence_kl(world, world.theta - step))
            / (2 * width)
            for step in steps
        ]
    )


def _theta_gradient(world: World, objective: Callable[[Vector], Tensor]) -> Vector:
    theta = world.theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(theta), theta)
    return gradient


def visit_counts(world: World, theta: Vector) -> Float[Tensor, "S"]:
    """Return the expected visits of each prefix per completion."""
    completions = world.completions
    probability = world.completion_logp(theta).exp()[completions.row_of_token]
    visits = torch.zeros(len(world.base), dtype=probability.dtype)
    return visits.index_add(0, completions.state, probability)


def reverse_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """Return KL(p || q) at every prefix."""
    return (logp.exp() * (logp - logq)).sum(-1)


def forward_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """Return KL(q || p) at every prefix."""
    return (logq.exp() * (logq - logp)).sum(-1)


def half_chi_square(logp: Tensor, logq: Tensor) -> Tensor:
    """Return half of 1 + chi-square(p || q) at every prefix."""
    return (2 * logp - logq).exp().sum(-1) / 2


def sign_surrogate(logp: Tensor, logq: Tensor) -> Tensor:
    """Return a term with the gradient sum_a p sign(log p - log q) grad log p at every prefix."""
    constant = (logp.exp() * (logp - logq).sign()).detach()
    return (constant * logp).sum(-1)


def bucketed_top_k_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """Return the KL over the likeliest tokens and a rest bucket, from probabilities."""
    p, q = logp.exp(), logq.exp()

    def weighted_log_ratio(p: Tensor, q: Tensor) -> Tensor:
        # truncation may exclude an outcome: 0, also in the gradient
        ratio = torch.where(p > 0, p, 1.0) / torch.where(p > 0, q, 1.0)
        return p * ratio.log()

    is_top = p >= p.sort(-1, descending=True).values[..., TOP_K - 1 : TOP_K]
    rest_p, rest_q = (p * ~is_top).sum(-1), (q * ~is_top).sum(-1)
    return weighted_log_ratio(is_top * p, q).sum(-1) + weighted_log_ratio(rest_p, rest_q)


def _exp_k1_cost(world: World) -> Float[Tensor, "B"]:
    completions = world.completions
    logp, ref = world.prefix_log_probs(world.theta), world.prefix_log_probs(world.theta_ref)
    k1 = (logp - ref)[completions.state, completions.token]
    total = torch.zeros(completions.num_rows, dtype=k1.dtype)
    return total.index_add(0, completions.row_of_token, k1.exp() * k1)
