"""Expensive diagnostics: their schedule, and the KL term's fraction of the gradient.

The KL gradient fraction, the update norm and, for a moving reference, the KL to the start need a
second pass or a copy of the weights. They are measured every 10 steps early on, then every 50, so
that a long run does not spend a twentieth of its time on them.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from klinic.learner.update import read_numbers, total_norm
from klinic.model.weights import full_tensor


class SplitGradients:
    """Separate gradients of the policy term and the KL term, to measure the KL's fraction.

    The policy gradient is computed first and stored; the KL gradient then comes from separate
    forward passes. The graphs of the policy term cannot be reused: a compiled model's backward
    refuses a second call, or, with `donated_buffer` off, silently returns a wrong gradient.
    """

    def __init__(self, trained: Iterable[Tensor]) -> None:
        self._trained = list(trained)
        self._policy: list[Tensor | None] = []

    def store_policy_grad(self) -> None:
        """Store the current gradient as the policy's, and clear it for the KL term's."""
        self._policy = [p.grad for p in self._trained]
        for p in self._trained:
            p.grad = None

    def combine(self, kl_coef: float) -> dict[str, float]:
        """Sum both gradients; return the KL's norm, its fraction, and the cosine between them."""
        policy, kl = [], []
        # in place: on a large model every further copy of the gradient counts
        for p, policy_grad in zip(self._trained, self._policy, strict=True):
            policy.append(torch.zeros_like(p) if policy_grad is None else policy_grad)
            kl.append(torch.zeros_like(p) if p.grad is None else p.grad.mul_(kl_coef))
            p.grad = None
        self._policy = []
        dots = [(a.double() * b.double()).sum() for a, b in zip(policy, kl, strict=True)]
        dot = sum(read_numbers([full_tensor(value) for value in dots]))
        kl_norm, policy_norm = total_norm(kl), total_norm(policy)
        for p, a, b in zip(self._trained, policy, kl, strict=True):
            p.grad = a.add_(b)
        return {
            "kl/grad_norm_kl": kl_norm,
            "kl/grad_share": kl_norm / max(kl_norm + policy_norm, 1e-30),
            "kl/grad_cosine_policy": dot / max(kl_norm * policy_norm, 1e-30),
        }


def kl_gradient_facts(metrics: dict[str, float]) -> dict[str, float]:
    """Return the record's facts about the KL gradient."""
    return {"grad_norm_kl": metrics["kl/grad_norm_kl"]} if metrics else {}


EARLY_INTERVAL, LATE_INTERVAL = 10, 50  # steps between diagnostics
NUM_EARLY_STEPS = 100  # steps


def is_diagnostic_step(step: int) -> bool:
    """Whether a step runs the expensive diagnostics.

    >>> [step for step in range(1, 220) if is_diagnostic_step(step)]
    [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 101, 151, 201]
    """
    return step % (EARLY_INTERVAL if step <= NUM_EARLY_STEPS else LATE_INTERVAL) == 1


def diagnostic_fraction(steps: int) -> float:
    """Return the fraction of `steps` steps that are diagnostic.

    >>> diagnostic_fraction(10), diagnostic_fraction(100), diagnostic_fraction(10_000)
    (0.1, 0.1, 0.0208)
    """
    early, late = min(steps, NUM_EARLY_STEPS), max(steps, NUM_EARLY_STEPS)
    num = (
        -(-early // EARLY_INTERVAL)
        + (late - 1) // LATE_INTERVAL
        - (NUM_EARLY_STEPS - 1) // LATE_INTERVAL
    )
    return num / steps
