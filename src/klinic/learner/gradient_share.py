"""Measure the KL term's fraction of the gradient."""

from collections.abc import Iterable

import torch
from torch import Tensor

from klinic.learner.update import norm
from klinic.model.weights import whole


class KLApart:
    """Separate gradients of the policy term and the KL term, to measure the KL's fraction.

    The policy gradient is computed first and stored; the KL gradient then comes from separate
    forward passes. The graphs of the policy term cannot be reused: a compiled model's backward
    refuses a second call, or, with `donated_buffer` off, silently returns a wrong gradient.
    """

    def __init__(self, trained: Iterable[Tensor]) -> None:
        self._trained = list(trained)
        self._policy: list[Tensor | None] = []

    def put_policy_aside(self) -> None:
        """Store the current gradient as the policy's, and clear it for the KL term's."""
        self._policy = [p.grad for p in self._trained]
        for p in self._trained:
            p.grad = None

    def join(self, kl_coef: float) -> dict[str, float]:
        """Sum both gradients; return the KL's norm, its fraction, and the cosine between them."""
        policy, kl = [], []
        for p, policy_grad in zip(self._trained, self._policy, strict=True):
            policy.append(torch.zeros_like(p) if policy_grad is None else policy_grad)
            kl.append(torch.zeros_like(p) if p.grad is None else kl_coef * p.grad)
        dots = [(a.double() * b.double()).sum() for a, b in zip(policy, kl, strict=True)]
        dot = sum(float(whole(value)) for value in dots)
        kl_norm, policy_norm = norm(kl), norm(policy)
        for p, a, b in zip(self._trained, policy, kl, strict=True):
            p.grad = a + b
        self._policy = []
        return {
            "kl/grad_norm_kl": kl_norm,
            "kl/grad_share": kl_norm / max(kl_norm + policy_norm, 1e-30),
            "kl/grad_cosine_policy": dot / max(kl_norm * policy_norm, 1e-30),
        }


def share_facts(share: dict[str, float]) -> dict[str, float]:
    """Return the record's facts about the KL gradient."""
    return {"grad_norm_kl": share["kl/grad_norm_kl"]} if share else {}
