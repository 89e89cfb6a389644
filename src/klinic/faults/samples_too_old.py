"""samples-too-old: batches wait in a queue before they are trained on.

Second mechanism: weights are updated during sampling, so completions start older.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.faults.sampler_patches import copy_weights, replace_attribute, use_weights
from klinic.sampler.transformers import TransformersSampler
from klinic.training import step

NUM_WAITING = {Severity.MILD: 1, Severity.NORMAL: 3}  # batches


@contextmanager
def delay_batches(severity: Severity) -> Iterator[None]:
    """Return the batch that was sampled several updates ago."""
    queue: deque[Any] = deque()

    def collect_delayed(real: Any, parts: Any, **options: Any) -> Any:
        queue.append(real(parts, **options))
        return queue.popleft() if len(queue) > NUM_WAITING[severity] else queue[0]

    with patch_attribute(step, "collect_rollouts", collect_delayed):
        yield


FAULT = Fault(
    cause="samples-too-old", mechanism="a batch queue before the learner", inject=delay_batches
)


MAX_LAG = {Severity.MILD: 1, Severity.NORMAL: 4}  # updates, at most
NUM_OLD_TOKENS = 2  # tokens sampled before the new weights arrive


@contextmanager
def start_with_old_weights(severity: Severity) -> Iterator[None]:
    """Sample the first tokens from weights of some updates ago, with their version."""
    past: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=MAX_LAG[severity] + 1)

    def load_and_store(real: Any, sampler: Any, weights: Any) -> Any:
        past.append((weights.version, copy_weights(sampler._policy.lm)))
        return real(sampler, weights)

    def finish_in_two_parts(real: Any, sampler: Any, rollouts: Any, step: int) -> Iterator[Any]:
        if sampler._params.temperature == 0:
            yield from real(sampler, rollouts, step)
            return
        version, weights = past[0]
        with (
            use_weights(sampler._policy.lm, weights),
            replace_attribute(sampler, "_version", version),
            replace_attribute(sampler, "_max_new_tokens", NUM_OLD_TOKENS),
        ):
            started = dict(real(sampler, rollouts, step))
        yield from ((i, r) for i, r in started.items() if r.finish_reason == "stop")
        unfinished = [i for i, r in started.items() if r.finish_reason == "length"]
        for index, rollout in real(sampler, [started[i] for i in unfinished], step):
            yield unfinished[index], rollout

    with ExitStack() as stack:
        stack.enter_context(patch_attribute(TransformersSampler, "load", load_and_store))
        stack.enter_context(
            patch_attribute(TransformersSampler, "_finish_rollouts", finish_in_two_parts)
        )
        yield


SECOND_FAULT = Fault(
    cause="samples-too-old",
    mechanism="completions start with weights of several updates ago, with their version recorded",
    inject=start_with_old_weights,
    settings={"learner.learning_rate": 1e-3, "loop.max_steps": 8},
)
