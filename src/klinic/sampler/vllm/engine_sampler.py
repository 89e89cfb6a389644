"""Samples from a vLLM engine whose weights the trainer replaces, from this or another process."""

import copy
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from torch import Tensor

from klinic.errors import LogitsError
from klinic.evidence.fields import NOTHING_ARRIVED
from klinic.evidence.rollout import Prompt, Rollout
from klinic.model.adapter_files import save_adapter
from klinic.model.adapters import TRAINED_ADAPTER
from klinic.model.device import release_cached_memory
from klinic.model.loading import Policy
from klinic.model.weights import Weights
from klinic.runtime.cleanup_process import start_cleanup_process
from klinic.sampler.random_streams import engine_seed
from klinic.sampler.rollouts import (
    GenerationOutput,
    append_turn,
    context_ids,
    empty_rollouts,
    remaining_tokens,
)
from klinic.sampler.token_sampling import GREEDY, SamplingParams
from klinic.sampler.vllm.engine import Adapter, Engine, GenerationRequest
from klinic.sampler.weight_group import ram_disk

EngineSamplerT = TypeVar("EngineSamplerT", bound="EngineSampler")
ADAPTER_IDS = itertools.count(1)
"""Adapter ids: an engine identifies an adapter by its id, so ids are unique per process."""


class EngineSampler:
    """Samples completions from a vLLM engine. The policy is read for its tokenizer and shapes."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        *,
        params: SamplingParams,
        max_new_tokens: int,
        group_size: int,
        seed: int,
    ) -> None:
        """Take a running engine; one with a sleep level sleeps until weights arrive."""
        self.policy = policy
        self.engine = engine
        self._params = params
        self._max_new_tokens = max_new_tokens
        self._group_size = group_size
        self._seed = seed
        self._is_asleep = False
        self._version = 0
        self._adapter: Adapter | None = None
        self.files = Path(tempfile.mkdtemp(prefix="klinic-weights-", dir=ram_disk()))
        """A folder in memory that ends with this process."""
        start_cleanup_process(folders=[self.files])
        self.sleep()

    def sleep(self) -> None:
        """Release the engine's GPU memory until the next weights."""
        if self.engine.sleep_level and not self._is_asleep:
            self.engine.sleep()
            self._is_asleep = True

    def prepare_for_weights(self) -> None:
        """Wake the memory of the weights.

        The cache wakes after they are sent: a level of 2 has lost them, and the learner may still
        need the memory of the cache while it sends.
        """
        if self._is_asleep:
            release_cached_memory()
            self.engine.wake_up("weights")

    def use_weights(
        self, version: int, probes: Sequence[GenerationRequest]
    ) -> list[GenerationOutput]:
        """Sample from the weights that arrived from now on; return what it generates for probes."""
        self._version = version
        if self._is_asleep:
            self.engine.wake_up("kv_cache")
            self._is_asleep = False
        self.engine.reset_prefix_cache()
        return self.engine.generate(probes, self._adapter)

    def put_adapter(self, weights: Weights, tensors: Mapping[str, Tensor]) -> str:
        """Load an adapter under a new name; return what is wrong if that failed."""
        old, number = self._adapter, next(ADAPTER_IDS)
        name = f"policy-{number}-{weights.fingerprint[:8]}"
        new = Adapter(name=name, number=number, folder=self.files / name)
        save_adapter(self.policy.lm, new.folder, adapter=TRAINED_ADAPTER, tensors=tensors)
        there = self.engine.put_adapter(new, old)
        self._adapter = new
        if old is not None:
            shutil.rmtree(old.folder, ignore_errors=True)
        return "" if there else NOTHING_ARRIVED

    def greedy(self: EngineSamplerT) -> EngineSamplerT:
        """Return a sampler of the most likely completion of each prompt, on the same weights."""
        view = copy.copy(self)
        view._params, view._group_size = GREEDY, 1
        return view

    def sample(self, prompts: Sequence[Prompt], *, step: int) -> Iterator[list[Rollout]]:
        """Yield the group of each prompt once all are finished."""
        finished = self.extend(empty_rollouts(prompts, self._group_size), step=step)
        for first in range(0, len(finished), self._group_size):
            yield finished[first : first + self._group_size]

    def extend(self, rollouts: Sequence[Rollout], *, step: int) -> list[Rollout]:
        """Continue each rollout after its last segment."""
        left = [
            remaining_tokens(rollout, self.policy, self._max_new_tokens) for rollout in rollouts
        ]
        done = [replace(rollout, finish_reason="length") for rollout in rollouts]
        indices = [index for index, num in enumerate(left) if num]
        requests = [self._make_request(rollouts[index], left[index], step) for index in indices]
        if requests and not self.engine.seeds_requests:
            first = rollouts[indices[0]]
            self.engine.seed_workers(self._completion_seed(first, step))
        outputs = self.engine.generate(requests, self._adapter) if requests else []
        for index, output in zip(indices, outputs, strict=True):
            _refuse_non_finite(output)
            done[index] = append_turn(rollouts[index], output, self.policy, version=self._version)
        return done

    def close(self) -> None:
        """Shut down the engine, or disconnect from the server."""
        self.engine.close()
        shutil.rmtree(self.files, ignore_errors=True)

    def _make_request(self, rollout: Rollout, num: int, step: int) -> GenerationRequest:
        return GenerationRequest(
            token_ids=context_ids(rollout).tolist(),
            seed=self._completion_seed(rollout, step) if self.engine.seeds_requests else None,
            max_tokens=num,
            params=self._params,
            eos_ids=self.policy.eos_ids,
        )

    def _completion_seed(self, rollout: Rollout, step: int) -> int:
        return engine_seed(
            seed=self._seed,
            step=step,
            prompt=rollout.prompt.index,
            sample=rollout.sample,
            skip=rollout.num_policy_tokens,
        )


def _refuse_non_finite(output: GenerationOutput) -> None:
    if not np.isfinite(output.logp).all():
        raise LogitsError(
            "vLLM returned log-probs that are not finite: an update made some of the policy's "
            "weights NaN or infinite. Lower learner.learning_rate and resume from an earlier "
            "checkpoint."
        )
