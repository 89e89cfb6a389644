"""samples-too-old: weights are updated during sampling, so completions start older."""

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.faults.second.sampling import copied, replaced, with_weights
from klinic.sampler.transformers import TransformersSampler

LAG = {Severity.MILD: 1, Severity.NORMAL: 4}  # updates, at most
BEGUN = 2  # tokens sampled before the new weights arrive


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Sample the first tokens from weights of some updates ago, with their version."""
    past: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=LAG[severity] + 1)

    def load(real: Any, sampler: Any, weights: Any) -> Any:
        past.append((weights.version, copied(sampler._policy.lm)))
        return real(sampler, weights)

    def finish(real: Any, sampler: Any, rollouts: Any, step: int) -> Iterator[Any]:
        if sampler._how.temperature == 0:
            yield from real(sampler, rollouts, step)
            return
        version, weights = past[0]
        with (
            with_weights(sampler._policy.lm, weights),
            replaced(sampler, "_version", version),
            replaced(sampler, "_max_new_tokens", BEGUN),
        ):
            begun = dict(real(sampler, rollouts, step))
        yield from ((i, r) for i, r in begun.items() if r.finish_reason == "stop")
        going = [i for i, r in begun.items() if r.finish_reason == "length"]
        for place, rollout in real(sampler, [begun[i] for i in going], step):
            yield going[place], rollout

    with ExitStack() as stack:
        stack.enter_context(patched(TransformersSampler, "load", load))
        stack.enter_context(patched(TransformersSampler, "_finish", finish))
        yield


FAULT = Fault(
    cause="samples-too-old",
    mechanism="completions start with weights of several updates ago, with their version recorded",
    inject=inject,
    settings={"learner.learning_rate": 1e-3, "loop.max_steps": 8},
)
