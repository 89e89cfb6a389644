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
    """Separate gradients of the policy term and the KL terms, to measure each one's fraction.

    The policy gradient is computed first and stored; those of the KL terms then come from separate
    forward passes. The graphs of the policy term cannot be reused: a compiled model's backward
    refuses a second call, or, with `donated_buffer` off, silently returns a wrong gradient.
    """

    def __init__(self, trained: Iterable[Tensor]) -> None:
        self._trained = list(trained)
        self._gradients: dict[str, list[Tensor]] = {}

    def store(self, term: str, coef: float = 1.0) -> None:
        """Store the current gradient times a coefficient as that of a term, and clear it."""
        # in place: on a large model every further copy of the gradient counts
        self._gradients[term] = [
            torch.zeros_like(p) if p.grad is None else p.grad.mul_(coef) for p in self._trained
        ]
        for p in self._trained:
            p.grad = None

    def combine(self) -> dict[str, float]:
        """Sum the gradients; return norm, fraction and cosine to the policy's of each KL term."""
        norms = {term: total_norm(gradients) for term, gradients in self._gradients.items()}
        policy = self._gradients.pop("policy")
        metrics: dict[str, float] = {}
        for term, gradients in self._gradients.items():
            dots = [(a.double() * b.double()).sum() for a, b in zip(policy, gradients, strict=True)]
            dot = sum(read_numbers([full_tensor(value) for value in dots]))
            metrics |= {
                f"{term}/{GRADIENT_NORMS[term]}": norms[term],
                f"{term}/grad_share": norms[term] / max(sum(norms.values()), 1e-30),
                f"{term}/grad_cosine_policy": dot / max(norms[term] * norms["policy"], 1e-30),
            }
        for gradients in self._gradients.values():
            for a, b in zip(policy, gradients, strict=True):
                a.add_(b)
        for p, gradient in zip(self._trained, policy, strict=True):
            p.grad = gradient
        self._gradients = {}
        return metrics


GRADIENT_NORMS = {"kl": "grad_norm_kl", "teacher": "grad_norm_teacher"}
"""Name of a term's gradient norm, as a fact and, after the name of the term, as a metric."""


def kl_gradient_facts(metrics: dict[str, float]) -> dict[str, float]:
    """Return the record's facts about the gradients of the KL terms."""
    names = {name: f"{term}/{name}" for term, name in GRADIENT_NORMS.items()}
    return {name: metrics[metric] for name, metric in names.items() if metric in metrics}


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
