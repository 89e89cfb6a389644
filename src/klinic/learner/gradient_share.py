"""Which part of the gradient is the KL term's."""

from collections.abc import Iterable

import torch
from torch import Tensor

from klinic.learner.update import norm
from klinic.model.weights import whole


class KLApart:
    """The KL term's gradient kept apart from the policy's, to see which share it has.

    The policy's gradient is made first and put aside; the KL term's then comes from forward passes
    of its own. The graphs of the policy's part will not do a second time: a compiled model's
    backward refuses it, or, with `donated_buffer` off, returns another gradient without a word.
    """

    def __init__(self, trained: Iterable[Tensor]) -> None:
        self._trained = list(trained)
        self._policy: list[Tensor | None] = []

    def put_policy_aside(self) -> None:
        """Take the gradient that is there for the policy's, and begin with the KL term's."""
        self._policy = [p.grad for p in self._trained]
        for p in self._trained:
            p.grad = None

    def join(self, kl_coef: float) -> dict[str, float]:
        """Add both into one gradient; return the KL's norm, its share and the angle between."""
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
    """Return what the record keeps of the KL term's part in the gradient."""
    return {"grad_norm_kl": share["kl/grad_norm_kl"]} if share else {}
