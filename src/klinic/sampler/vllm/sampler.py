"""Sampler on vLLM: an engine that klinic starts, or a running server.

After every update it sends the weights, resets the prefix cache, reads back the digest of the
received weights, and compares engine and policy log-probs with a probe.
"""

import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from klinic.errors import LogitsError
from klinic.evidence.rollout import Prompt, Rollout
from klinic.model.adapter_files import save_adapter
from klinic.model.adapters import TRAINED_ADAPTER, has_adapter
from klinic.model.device import release_cached_memory
from klinic.model.loading import Policy
from klinic.model.weights import Weights, trainable_tensors
from klinic.runtime.cleanup_process import start_cleanup_process
from klinic.sampler.protocol import LoadResult
from klinic.sampler.random_streams import engine_seed
from klinic.sampler.rollouts import (
    GenerationOutput,
    append_turn,
    context_ids,
    empty_rollouts,
    remaining_tokens,
)
from klinic.sampler.token_sampling import SamplingParams
from klinic.sampler.vllm.engine import Adapter, Engine, GenerationRequest
from klinic.sampler.vllm.sync_check import SyncProbe
from klinic.sampler.vllm.weight_sender import WeightSender
from klinic.sampler.weight_group import ram_disk

ADAPTER_IDS = itertools.count(1)
"""Adapter ids: an engine identifies an adapter by its id, so ids are unique per process."""


class VllmSampler:
    """Samples completions from a vLLM engine that holds the policy's weights."""

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
        """Take a running engine; one with a sleep level sleeps until the first `load`."""
        self._policy = policy
        self._engine = engine
        self._params = params
        self._max_new_tokens = max_new_tokens
        self._group_size = group_size
        self._seed = seed
        self._is_asleep = False
        self._version = 0
        self._adapter: Adapter | None = None
        self._sender: WeightSender | None = None
        self._probe = SyncProbe(policy)
        self._files = Path(tempfile.mkdtemp(prefix="klinic-weights-", dir=ram_disk()))
        start_cleanup_process(folders=[self._files])
        self.sleep()

    def sleep(self) -> None:
        """Release the engine's GPU memory until the next `load`."""
        if self._engine.sleep_level and not self._is_asleep:
            self._engine.sleep()
            self._is_asleep = True

    def load(self, weights: Weights) -> LoadResult:
        """Wake the engine, send the policy's weights, and probe that they are in use.

        The cache wakes after the weights: a level of 2 has lost them, and the learner may still
        need the memory of the cache while it sends.
        """
        if self._is_asleep:
            release_cached_memory()
            self._engine.wake_up("weights")
        if has_adapter(self._policy.lm):
            fingerprint = self._deliver_adapter(weights)
        else:
            fingerprint = self._deliver_weights(weights)
        self._version = weights.version
        if self._is_asleep:
            self._engine.wake_up("kv_cache")
            self._is_asleep = False
        self._engine.reset_prefix_cache()
        requests = self._probe.make_requests()
        outputs = self._engine.generate(requests, self._adapter)
        return LoadResult(
            fingerprint=fingerprint, sync_gaps=self._probe.measure_gaps(requests, outputs)
        )

    def _deliver_weights(self, weights: Weights) -> str:
        """Send all trained weights; return the digest that the workers received."""
        if self._sender is None:
            self._sender = WeightSender(self._engine, str(self._files / "store"))
        self._sender.send(
            trainable_tensors(self._policy.lm), f"{weights.version} {weights.fingerprint}"
        )
        return " and ".join(sorted(self._engine.received_digests()))

    def _deliver_adapter(self, weights: Weights) -> str:
        """Load the adapter under a new name; return its fingerprint, "none" if that failed."""
        old, number = self._adapter, next(ADAPTER_IDS)
        name = f"policy-{number}-{weights.fingerprint[:8]}"
        new = Adapter(name=name, number=number, folder=self._files / name)
        save_adapter(self._policy.lm, new.folder, adapter=TRAINED_ADAPTER)
        there = self._engine.put_adapter(new, old)
        self._adapter = new
        if old is not None:
            shutil.rmtree(old.folder, ignore_errors=True)
        return weights.fingerprint if there else "none"

    def sample(self, prompts: Sequence[Prompt], *, step: int) -> Iterator[list[Rollout]]:
        """Yield the group of each prompt once all are finished."""
        finished = self.extend(empty_rollouts(prompts, self._group_size), step=step)
        for first in range(0, len(finished), self._group_size):
            yield finished[first : first + self._group_size]

    def extend(self, rollouts: Sequence[Rollout], *, step: int) -> list[Rollout]:
        """Continue each rollout after its last segment."""
        left = [
            remaining_tokens(rollout, self._policy, self._max_new_tokens) for rollout in rollouts
        ]
        done = [replace(rollout, finish_reason="length") for rollout in rollouts]
        indices = [index for index, num in enumerate(left) if num]
        requests = [self._make_request(rollouts[index], left[index], step) for index in indices]
        if requests and not self._engine.seeds_requests:
            first = rollouts[indices[0]]
            self._engine.seed_workers(self._completion_seed(first, step))
        outputs = self._engine.generate(requests, self._adapter) if requests else []
        for index, output in zip(indices, outputs, strict=True):
            _refuse_non_finite(output)
            done[index] = append_turn(rollouts[index], output, self._policy, version=self._version)
        return done

    def close(self) -> None:
        """Shut down the engine, or disconnect from the server."""
        if self._sender is not None:
            self._sender.close()
        self._engine.close()
        shutil.rmtree(self._files, ignore_errors=True)

    def _make_request(self, rollout: Rollout, num: int, step: int) -> GenerationRequest:
        return GenerationRequest(
            token_ids=context_ids(rollout).tolist(),
            seed=self._completion_seed(rollout, step) if self._engine.seeds_requests else None,
            max_tokens=num,
            params=self._params,
            eos_ids=self._policy.eos_ids,
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
