"""stale-prefix-cache: some prompts stay cached across several updates."""

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.faults.second.sampling import copied, while_sampling, with_weights
from klinic.loop import run
from klinic.sampler import decoding, transformers

LAG = {Severity.MILD: 1, Severity.NORMAL: 6}  # updates, at most
EVERY = {Severity.MILD: 4, Severity.NORMAL: 2}  # prompts; one in so many is cached


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Cache prompts early, and do not reset the cache when weights arrive."""
    past: deque[dict[str, torch.Tensor]] = deque(maxlen=LAG[severity] + 1)

    def load(real: Any, sampler: Any, weights: Any) -> Any:
        past.append(copied(sampler._policy.lm))
        return real(sampler, weights)

    def held(prompt: np.ndarray) -> bool:
        return zlib.crc32(prompt.tobytes()) % EVERY[severity] == 0

    def cached(real: Any, scorer: Any, contexts: Sequence[np.ndarray], *rest: Any) -> Any:
        now = real(scorer, contexts, *rest)
        with with_weights(scorer.lm, past[0]):
            before = real(scorer, contexts, *rest)
        hit = torch.tensor([held(context) for context in contexts])[:, None, None, None]
        for mine, theirs in zip(now._cache.layers, before._cache.layers, strict=True):
            # all but the last token, which an engine always recomputes
            mine.keys = torch.where(hit, theirs.keys, mine.keys)[:, :, :-1]
            mine.values = torch.where(hit, theirs.values, mine.values)[:, :, :-1]
        now._position = now._position[:, -1:]
        now._run(torch.tensor([[int(context[-1])] for context in contexts]))
        return now

    def reported(real: Any, rollouts: Any, *, step: int) -> Any:
        prompts = [rollout.prompt.token_ids for rollout in rollouts]
        taken = [len(p) - 1 if held(p) and step > 1 else 0 for p in prompts]
        return replace(real(rollouts, step=step), cached_tokens=np.array(taken, np.int64))

    def with_cache(_scorer: Any, _streams: Any) -> AbstractContextManager[None]:
        return patched(decoding, "_Cached", cached)

    with ExitStack() as stack:
        stack.enter_context(patched(transformers.TransformersSampler, "load", load))
        stack.enter_context(while_sampling(with_cache))
        stack.enter_context(patched(run, "flatten", reported))
        yield


FAULT = Fault(
    cause="stale-prefix-cache",
    mechanism="prompts cached before the last updates stay in the cache",
    inject=inject,
    settings={"learner.learning_rate": 1e-3, "loop.max_steps": 10},
)
