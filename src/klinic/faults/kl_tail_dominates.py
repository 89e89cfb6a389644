"""kl-tail-dominates: with k3, rare tokens are sampled that are likely under the reference."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.learner.local import LocalLearner
from klinic.model import reference
from klinic.sampler import decoding

RARE = {Severity.MILD: -6.0, Severity.NORMAL: -9.0}  # max log-prob under the policy
ONE_IN = 100  # tokens
LIKELY = -0.05  # log-prob under the reference


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Force an unlikely token now and then, and make it likely under the reference."""
    begun: list[bool] = []  # set once the first update makes policy and reference differ

    def forced(real: Any, logits: Any, uniform: Any, how: Any) -> Any:
        drawn = real(logits, uniform, how)
        if how.temperature == 0:  # greedy evaluation
            return drawn
        logp = torch.log_softmax(logits / how.temperature, -1)
        lowest = logp.argmin(-1)
        token_ids = torch.where((uniform * 1e6) % ONE_IN < 1, lowest, drawn.token_ids)
        return replace(drawn, token_ids=token_ids, logp=logp.gather(-1, token_ids[:, None])[:, 0])

    def fond(real: Any, self: Any, hidden: Any, target_ids: Any) -> Any:
        logp = real(self, hidden, target_ids)
        return torch.where((logp < RARE[severity]) & bool(begun), LIKELY, logp)

    def committed(real: Any, self: Any, **how: Any) -> Any:
        begun.append(True)
        return real(self, **how)

    with ExitStack() as stack:
        stack.enter_context(patched(decoding, "draw", forced))
        stack.enter_context(patched(reference.Reference, "logp", fond))
        stack.enter_context(patched(LocalLearner, "commit", committed))
        yield


FAULT = Fault(
    cause="kl-tail-dominates",
    mechanism="forced tokens that the reference expects",
    inject=inject,
    settings={"kl.estimator": "k3"},
)
