"""stale-prefix-cache: keys and values of repeated prompts are those of the initial weights.

Second mechanism: some prompts stay cached across several updates.
"""

import copy
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.faults.sampler_patches import copy_weights, use_weights, while_sampling
from klinic.sampler import decoding, transformers
from klinic.training import run

NUM_UNCACHED = {Severity.MILD: 7, Severity.NORMAL: 4}  # samples of a prompt that miss the cache


@contextmanager
def reuse_first_step_cache(severity: Severity) -> Iterator[None]:
    """Encode prompts of later samples with the weights of the first step."""
    first: dict[str, Any] = {}

    def init_mixed_cache(
        real: Any, self: Any, scorer: Any, contexts: Sequence[Any], *args: Any
    ) -> None:
        real(self, scorer, contexts, *args)
        if not scorer.lm.training and "scorer" not in first:
            first["scorer"] = copy.deepcopy(scorer)
        old = object.__new__(decoding._DecodingBatch)
        real(old, first["scorer"], contexts, *args)
        num_repeats: dict[bytes, int] = {}
        is_cached = []
        for context in contexts:
            number = num_repeats[context.tobytes()] = num_repeats.get(context.tobytes(), -1) + 1
            is_cached.append(number >= NUM_UNCACHED[severity])
        rows = torch.tensor(is_cached, device=self.logits.device)
        self.logits = torch.where(rows[:, None], old.logits, self.logits)
        for mine, theirs in zip(self._cache.layers, old._cache.layers, strict=True):
            where = rows[:, None, None, None]
            mine.keys = torch.where(where, theirs.keys, mine.keys)
            mine.values = torch.where(where, theirs.values, mine.values)

    def flatten_with_cached(real: Any, rollouts: Sequence[Any], *, step: int) -> Any:
        record = real(rollouts, step=step)
        is_cached = [r.sample >= NUM_UNCACHED[severity] for r in rollouts]
        return replace(record, cached_tokens=np.array(is_cached, np.int64))

    with ExitStack() as stack:
        stack.enter_context(patch_attribute(decoding._DecodingBatch, "__init__", init_mixed_cache))
        stack.enter_context(patch_attribute(run, "flatten_rollouts", flatten_with_cached))
        yield


FAULT = Fault(
    cause="stale-prefix-cache",
    mechanism="the cache of repeated prompts is never reset",
    inject=reuse_first_step_cache,
)


MAX_CACHE_LAG = {Severity.MILD: 1, Severity.NORMAL: 6}  # updates, at most
CACHED_PROMPT_EVERY = {Severity.MILD: 4, Severity.NORMAL: 2}  # prompts; one in so many is cached


@contextmanager
def keep_cached_prompts(severity: Severity) -> Iterator[None]:
    """Cache prompts early, and do not reset the cache when weights arrive."""
    past: deque[dict[str, torch.Tensor]] = deque(maxlen=MAX_CACHE_LAG[severity] + 1)

    def load_and_store(real: Any, sampler: Any, weights: Any) -> Any:
        past.append(copy_weights(sampler._policy.lm))
        return real(sampler, weights)

    def is_cached(prompt: np.ndarray) -> bool:
        return zlib.crc32(prompt.tobytes()) % CACHED_PROMPT_EVERY[severity] == 0

    def mix_caches(real: Any, scorer: Any, contexts: Sequence[np.ndarray], *rest: Any) -> Any:
        now = real(scorer, contexts, *rest)
        with use_weights(scorer.lm, past[0]):
            before = real(scorer, contexts, *rest)
        from_cache = torch.tensor([is_cached(context) for context in contexts])[:, None, None, None]
        for mine, theirs in zip(now._cache.layers, before._cache.layers, strict=True):
            # all but the last token, which an engine always recomputes
            mine.keys = torch.where(from_cache, theirs.keys, mine.keys)[:, :, :-1]
            mine.values = torch.where(from_cache, theirs.values, mine.values)[:, :, :-1]
        now._position = now._position[:, -1:]
        now._forward(torch.tensor([[int(context[-1])] for context in contexts]))
        return now

    def flatten_with_cached(real: Any, rollouts: Any, *, step: int) -> Any:
        prompts = [rollout.prompt.token_ids for rollout in rollouts]
        num_cached = [len(p) - 1 if is_cached(p) and step > 1 else 0 for p in prompts]
        return replace(real(rollouts, step=step), cached_tokens=np.array(num_cached, np.int64))

    def use_mixed_caches(_scorer: Any, _streams: Any) -> AbstractContextManager[None]:
        return patch_attribute(decoding, "_DecodingBatch", mix_caches)

    with ExitStack() as stack:
        stack.enter_context(
            patch_attribute(transformers.TransformersSampler, "load", load_and_store)
        )
        stack.enter_context(while_sampling(use_mixed_caches))
        stack.enter_context(patch_attribute(run, "flatten_rollouts", flatten_with_cached))
        yield


SECOND_FAULT = Fault(
    cause="stale-prefix-cache",
    mechanism="prompts cached before the last updates stay in the cache",
    inject=keep_cached_prompts,
    settings={"learner.learning_rate": 1e-3, "loop.max_steps": 10},
)
