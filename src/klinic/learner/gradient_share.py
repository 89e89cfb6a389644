"""Which part of the gradient is the KL term's."""

from typing import Any

import torch
from torch import Tensor

from klinic.learner.update import norm


class KLApart:
    """The KL term's gradient kept apart from the policy's, to see which share it has."""

    def __init__(self, lm: Any) -> None:
        self._trained = [p for p in lm.parameters() if p.requires_grad]
        self._kl: list[Tensor] | None = None

    def add(self, kl: Tensor | None) -> None:
        """Add the gradient of one micro-batch, from a forward pass of its own.

        The graph of the policy's part will not do a second time: a compiled model's backward
        refuses it, or, with `donated_buffer` off, returns another gradient without a word.
        """
        if kl is None:
            return
        new = torch.autograd.grad(kl, self._trained, allow_unused=True, materialize_grads=True)
        self._kl = (
            list(new) if self._kl is None else [a + b for a, b in zip(self._kl, new, strict=True)]
        )

    def join(self, kl_coef: float) -> dict[str, float]:
        """Add it to the policy's gradient; return its norm, its share and the angle between."""
        if self._kl is None:
            return {}
        policy = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained]
        kl = [kl_coef * g for g in self._kl]
        dot = sum(float((a.double() * b.double()).sum()) for a, b in zip(policy, kl, strict=True))
        kl_norm, policy_norm = norm(kl), norm(policy)
        for p, a, b in zip(self._trained, policy, kl, strict=True):
            p.grad = a + b
        return {
            "kl/grad_norm_kl": kl_norm,
            "kl/grad_share": kl_norm / max(kl_norm + policy_norm, 1e-30),
            "kl/grad_cosine_policy": dot / max(kl_norm * policy_norm, 1e-30),
        }


def share_facts(share: dict[str, float]) -> dict[str, float]:
    """Return what the record keeps of the KL term's part in the gradient."""
    return {"grad_norm_kl": share["kl/grad_norm_kl"]} if share else {}
