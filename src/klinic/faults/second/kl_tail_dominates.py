"""kl-tail-dominates: the policy has nearly unlearned tokens that the reference prefers, with k3."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import assembly
from klinic.sampler import decoding

TOKENS = (11, 12)  # the digits 8 and 9
LOWERED = {Severity.MILD: 2.0, Severity.NORMAL: 5.0}  # subtracted from their logits


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Lower some logits of the policy, in sampler and learner alike, not in its reference."""
    by = LOWERED[severity]

    def without(real: Any, policy: Any, **how: Any) -> Any:
        reference = real(policy, **how)
        policy.head.register_forward_hook(lambda _module, _args, logits: _plus(logits, -by))
        return reference

    def fair(real: Any, logits: Any, uniform: Any, how: Any) -> Any:
        evaluation = how.temperature == 0
        return real(_plus(logits, by) if evaluation else logits, uniform, how)

    with ExitStack() as stack:
        stack.enter_context(patched(assembly, "as_it_starts", without))
        stack.enter_context(patched(decoding, "draw", fair))
        yield


def _plus(logits: torch.Tensor, by: float) -> torch.Tensor:
    bias = torch.zeros(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    bias[list(TOKENS)] = by
    return logits + bias


FAULT = Fault(
    cause="kl-tail-dominates",
    mechanism="with k3, tokens that the policy has nearly unlearned and the reference prefers",
    inject=inject,
    settings={
        "kl.estimator": "k3",
        "learner.learning_rate": 1e-4,
        "loop.group_size": 24,
        "loop.max_steps": 10,
    },
)
