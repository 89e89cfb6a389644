"""kl-tail-dominates: with k3, rare tokens are sampled that are likely under the reference.

Second mechanism: the policy has nearly unlearned tokens that the reference prefers, with k3.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.learner.local import LocalLearner
from klinic.model import reference
from klinic.sampler import decoding
from klinic.training import build

RARE_LOGP = {Severity.MILD: -6.0, Severity.NORMAL: -9.0}  # max log-prob under the policy
FORCED_EVERY = 100  # tokens
LIKELY_LOGP = -0.05  # log-prob under the reference


@contextmanager
def force_rare_tokens(severity: Severity) -> Iterator[None]:
    """Force an unlikely token now and then, and make it likely under the reference."""
    updates: list[bool] = []  # set once the first update makes policy and reference differ

    def draw_forced(real: Any, logits: Any, uniform: Any, params: Any) -> Any:
        samples = real(logits, uniform, params)
        if params.temperature == 0:  # greedy evaluation
            return samples
        logp = torch.log_softmax(logits / params.temperature, -1)
        lowest = logp.argmin(-1)
        token_ids = torch.where((uniform * 1e6) % FORCED_EVERY < 1, lowest, samples.token_ids)
        return replace(samples, token_ids=token_ids, logp=logp.gather(-1, token_ids[:, None])[:, 0])

    def raise_rare_logp(real: Any, self: Any, hidden: Any, target_ids: Any) -> Any:
        logp = real(self, hidden, target_ids)
        return torch.where((logp < RARE_LOGP[severity]) & bool(updates), LIKELY_LOGP, logp)

    def commit_and_mark(real: Any, self: Any, **options: Any) -> Any:
        updates.append(True)
        return real(self, **options)

    with ExitStack() as stack:
        stack.enter_context(patch_attribute(decoding, "sample_tokens", draw_forced))
        stack.enter_context(patch_attribute(reference.Reference, "logp", raise_rare_logp))
        stack.enter_context(patch_attribute(LocalLearner, "commit", commit_and_mark))
        yield


FAULT = Fault(
    cause="kl-tail-dominates",
    mechanism="forced tokens that the reference expects",
    inject=force_rare_tokens,
    settings={"kl.estimator": "k3"},
)


SUPPRESSED_IDS = (11, 12)  # the digits 8 and 9
LOGIT_OFFSET = {Severity.MILD: 2.0, Severity.NORMAL: 5.0}  # subtracted from their logits


@contextmanager
def suppress_policy_tokens(severity: Severity) -> Iterator[None]:
    """Lower some logits of the policy, in sampler and learner alike, not in its reference."""
    offset = LOGIT_OFFSET[severity]

    def reference_before_suppression(real: Any, policy: Any, **options: Any) -> Any:
        reference = real(policy, **options)
        policy.head.register_forward_hook(
            lambda _module, _args, logits: _shift_logits(logits, -offset)
        )
        return reference

    def draw_fairly(real: Any, logits: Any, uniform: Any, params: Any) -> Any:
        evaluation = params.temperature == 0
        return real(_shift_logits(logits, offset) if evaluation else logits, uniform, params)

    with ExitStack() as stack:
        stack.enter_context(
            patch_attribute(build, "reference_at_start", reference_before_suppression)
        )
        stack.enter_context(patch_attribute(decoding, "sample_tokens", draw_fairly))
        yield


def _shift_logits(logits: torch.Tensor, offset: float) -> torch.Tensor:
    bias = torch.zeros(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    bias[list(SUPPRESSED_IDS)] = offset
    return logits + bias


SECOND_FAULT = Fault(
    cause="kl-tail-dominates",
    mechanism="with k3, tokens that the policy has nearly unlearned and the reference prefers",
    inject=suppress_policy_tokens,
    settings={
        "kl.estimator": "k3",
        "learner.learning_rate": 1e-4,
        "loop.group_size": 24,
        "loop.max_steps": 10,
    },
)
