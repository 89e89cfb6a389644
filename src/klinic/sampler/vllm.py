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
from klinic.model.adapters import TRAINED, is_adapted
from klinic.model.loading import Policy
from klinic.model.weights import Weights, trained
from klinic.sampler.decoding import FinishReason
from klinic.sampler.drawing import Drawing
from klinic.sampler.protocol import Loaded
from klinic.sampler.random_streams import engine_seed
from klinic.sampler.rollouts import Said, context_of, grown, room, started
from klinic.sampler.sync_probe import SyncProbe
from klinic.sampler.vllm_engine import Adapter, Asked, Engine, Told
from klinic.sampler.vllm_transfer import WeightSender
from klinic.sampler.weight_group import in_memory
from klinic.undertaker import when_this_dies

NUMBERS = itertools.count(1)
"""Adapter ids: an engine identifies an adapter by its id, so ids are unique per process."""


class VllmSampler:
    """Samples completions from a vLLM engine that holds the policy's weights."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        *,
        how: Drawing,
        max_new_tokens: int,
        group_size: int,
        seed: int,
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._how = how
        self._max_new_tokens = max_new_tokens
        self._group_size = group_size
        self._seed = seed
        self._version = 0
        self._adapter: Adapter | None = None
        self._sender: WeightSender | None = None
        self._probe = SyncProbe(policy)
        self._files = Path(tempfile.mkdtemp(prefix="klinic-weights-", dir=in_memory()))
        when_this_dies(delete=[self._files])

    def load(self, weights: Weights) -> Loaded:
        """Send the policy's weights and probe that they are in use."""
        if is_adapted(self._policy.lm):
            fingerprint = self._deliver_adapter(weights)
        else:
            fingerprint = self._deliver_weights(weights)
        self._version = weights.version
        self._engine.forget_prefixes()
        asked = self._probe.asked()
        told = self._engine.generate(asked, self._adapter)
        return Loaded(fingerprint=fingerprint, answer=self._probe.judged(asked, told))

    def _deliver_weights(self, weights: Weights) -> str:
        """Send all trained weights; return the digest that the workers received."""
        if self._sender is None:
            self._sender = WeightSender(self._engine, str(self._files / "store"))
        self._sender.send(trained(self._policy.lm), f"{weights.version} {weights.fingerprint}")
        return " and ".join(sorted(self._engine.received()))

    def _deliver_adapter(self, weights: Weights) -> str:
        """Load the adapter under a new name; return its fingerprint, "none" if that failed."""
        old, number = self._adapter, next(NUMBERS)
        name = f"policy-{number}-{weights.fingerprint[:8]}"
        new = Adapter(name=name, number=number, folder=self._files / name)
        save_adapter(self._policy.lm, new.folder, adapter=TRAINED)
        there = self._engine.put_adapter(new, old)
        self._adapter = new
        if old is not None:
            shutil.rmtree(old.folder, ignore_errors=True)
        return weights.fingerprint if there else "none"

    def sample(self, prompts: Sequence[Prompt], *, step: int) -> Iterator[list[Rollout]]:
        """Yield the group of each prompt once all are finished."""
        finished = self.extend(started(prompts, self._group_size), step=step)
        for first in range(0, len(finished), self._group_size):
            yield finished[first : first + self._group_size]

    def extend(self, rollouts: Sequence[Rollout], *, step: int) -> list[Rollout]:
        """Continue each rollout after its last segment."""
        left = [room(rollout, self._policy, self._max_new_tokens) for rollout in rollouts]
        done = [replace(rollout, finish_reason="length") for rollout in rollouts]
        places = [place for place, num in enumerate(left) if num]
        asked = [self._asked(rollouts[place], left[place], step) for place in places]
        told = self._engine.generate(asked, self._adapter) if asked else []
        for place, answer in zip(places, told, strict=True):
            done[place] = grown(rollouts[place], _said(answer), self._policy, version=self._version)
        return done

    def close(self) -> None:
        """Shut down the engine, or disconnect from the server."""
        if self._sender is not None:
            self._sender.close()
        self._engine.close()
        shutil.rmtree(self._files, ignore_errors=True)

    def _asked(self, rollout: Rollout, num: int, step: int) -> Asked:
        seed = engine_seed(
            seed=self._seed,
            step=step,
            prompt=rollout.prompt.index,
            sample=rollout.sample,
            skip=rollout.num_policy_tokens,
        )
        return Asked(
            token_ids=context_of(rollout).tolist(),
            seed=seed,
            max_tokens=num,
            how=self._how,
            eos_ids=self._policy.eos_ids,
        )


def _said(told: Told) -> Said:
    if not np.isfinite(told.logp).all():
        raise LogitsError(
            "vLLM returned log-probs that are not finite: an update made some of the policy's "
            "weights NaN or infinite. Lower learner.learning_rate and resume from an earlier "
            "checkpoint."
        )
    reason: FinishReason = "stop" if told.finish_reason == "stop" else "length"
    return Said(
        token_ids=told.token_ids,
        logp=told.logp,
        finish_reason=reason,
        context=told.context,
        cached_tokens=told.cached_tokens,
    )
