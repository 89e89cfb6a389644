"""The sampler inside a Ray worker. Its weights come from the driver, to an engine or to itself."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from klinic.cluster.session import local_address
from klinic.evidence.rollout import Prompt, Rollout
from klinic.model.adapters import has_adapter
from klinic.model.loading import Policy
from klinic.model.tensor_prints import TensorPrint, print_tensor
from klinic.model.weight_stream import StreamPlan
from klinic.model.weights import Weights, trainable_tensors
from klinic.sampler.protocol import Sampler
from klinic.sampler.rollouts import GenerationOutput
from klinic.sampler.vllm.engine import GenerationRequest
from klinic.sampler.vllm.engine_sampler import EngineSampler
from klinic.sampler.weight_group import WeightGroup
from klinic.sampler.weight_sender import WeightTransferControl


class HostReceiver:
    """Receives weights into tensors of this process."""

    num_workers = 1

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._prints: dict[str, TensorPrint] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the driver's process group."""
        self._group = WeightGroup(
            init_info["store"],
            rank=init_info["first_rank"],
            size=init_info["size"],
            host=init_info["host"],
            timeout=timedelta(seconds=init_info["seconds"]),
        )

    def start_weight_update(self) -> None:
        """Forget what arrived before."""
        self._prints = {}

    @torch.no_grad()
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive every tensor."""
        for tensors in self._group.receive(StreamPlan.from_json(**update_info)):
            self._prints |= {name: print_tensor(p) for name, p in tensors.items()}
            for name in tensors:
                self._tensors[name].copy_(tensors[name])
            del tensors  # before the next ones are received

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing: the tensors are in place."""

    def received_weights(self) -> list[dict[str, TensorPrint]]:
        """Return the fingerprints of the tensors that arrived last."""
        return [self._prints]


class HostedSampler:
    """A sampler with the receiver of its weights; the driver calls its methods by name."""

    def __init__(self, policy: Policy, sampler: Sampler | EngineSampler) -> None:
        """Take a sampler on the policy, or on an engine beside a policy without values."""
        self._policy = policy
        self._sampler = sampler
        self._receiver: WeightTransferControl
        if isinstance(sampler, EngineSampler) and not has_adapter(policy.lm):
            self._receiver = sampler.engine
        else:
            self._receiver = HostReceiver(trainable_tensors(policy.lm))

    def count_receivers(self) -> int:
        """Return how many processes receive weights here."""
        return self._receiver.num_workers

    def join(self, init_info: dict[str, Any]) -> None:
        """Make the receivers join the driver's process group."""
        info = dict(init_info)
        info["host"] = local_address(is_local=info.pop("is_local"))
        self._receiver.init_weight_transfer_engine(info)

    def call_receiver(self, name: str, *arguments: Any) -> Any:
        """Call a method of the weight transfer."""
        return getattr(self._receiver, name)(*arguments)

    def use_weights(
        self, weights: Weights, probes: Sequence[GenerationRequest]
    ) -> list[GenerationOutput]:
        """Sample from what arrived from now on; return what an engine generates for probes."""
        if not isinstance(self._sampler, EngineSampler):
            self._sampler.load(weights)
            return []
        if has_adapter(self._policy.lm):
            self._sampler.put_adapter(weights, trainable_tensors(self._policy.lm))
        return self._sampler.use_weights(weights.version, probes)

    def sample(self, prompts: Sequence[Prompt], step: int, is_greedy: bool) -> list[list[Rollout]]:
        """Return the group of each prompt."""
        sampler = self._sampler.greedy() if is_greedy else self._sampler
        return list(sampler.sample(prompts, step=step))

    def extend(self, rollouts: Sequence[Rollout], step: int, is_greedy: bool) -> list[Rollout]:
        """Continue each rollout after its segments."""
        sampler = self._sampler.greedy() if is_greedy else self._sampler
        return sampler.extend(rollouts, step=step)

    def close(self) -> None:
        """Shut down the engine, if there is one."""
        self._sampler.close()
