"""Sampler on vLLM: an engine that klinic starts, or a running server.

After every update it sends the weights, resets the prefix cache, compares fingerprints of what was
sent and what arrived, and compares engine and policy log-probs with a probe.
"""

import torch

from klinic.model.adapters import has_adapter
from klinic.model.loading import Policy
from klinic.model.policy_source import WeightSource
from klinic.model.tensor_prints import describe_damage
from klinic.model.weights import Weights
from klinic.sampler.protocol import LoadResult
from klinic.sampler.token_sampling import SamplingParams
from klinic.sampler.vllm.engine import Engine
from klinic.sampler.vllm.engine_sampler import EngineSampler
from klinic.sampler.vllm.sync_check import SyncProbe
from klinic.sampler.weight_sender import WeightSender


class VllmSampler(EngineSampler):
    """Samples from an engine that this process sends the learner's weights to."""

    def __init__(  # noqa: PLR0913 - what it samples from, and how, by keyword
        self,
        policy: Policy,
        source: WeightSource,
        engine: Engine,
        *,
        params: SamplingParams,
        max_new_tokens: int,
        group_size: int,
        seed: int,
    ) -> None:
        """Take the source of the weights and a running engine."""
        super().__init__(
            policy,
            engine,
            params=params,
            max_new_tokens=max_new_tokens,
            group_size=group_size,
            seed=seed,
        )
        self._source = source
        self._sender: WeightSender | None = None
        self._probe = SyncProbe(policy)

    def load(self, weights: Weights) -> LoadResult:
        """Wake the engine, send the policy's weights, and probe that they are in use."""
        self.prepare_for_weights()
        if has_adapter(self.policy.lm):
            with self._source.stream_weights() as stream:
                damage = self.put_adapter(weights, stream.collect())
        else:
            damage = self._send_weights(weights)
        requests = self._probe.make_requests()
        outputs = self.use_weights(weights.version, requests)
        return LoadResult(
            fingerprint=weights.fingerprint,
            sync_gaps=self._probe.measure_gaps(requests, outputs, self._source),
            damage=damage,
        )

    def _send_weights(self, weights: Weights) -> str:
        """Send all trained weights; return what is wrong with those that arrived."""
        if self._sender is None:
            self._sender = WeightSender(self.engine, str(self.files / "store"))
        with self._source.stream_weights(getattr(torch, self.engine.dtype)) as stream:
            self._sender.send(stream, f"{weights.version} {weights.fingerprint}")
        return describe_damage(stream.fingerprints, self.engine.received_weights())

    def close(self) -> None:
        """Shut down the engine, or disconnect from the server."""
        if self._sender is not None:
            self._sender.close()
        super().close()
