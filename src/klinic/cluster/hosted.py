"""A sampler inside a worker: it receives weights into a policy of its own and samples with them."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from klinic.cluster.addresses import own_host
from klinic.errors import KlinicError
from klinic.evidence.rollout import Prompt, Rollout
from klinic.model.loading import Policy
from klinic.model.weights import Weights, trained
from klinic.sampler.protocol import Loaded, Sampler
from klinic.sampler.weight_group import TCP, open_group

LOOK_EVERY = timedelta(seconds=0.5)


class GroupLostError(KlinicError, RuntimeError):
    """Weights did not arrive, because somebody of the group is gone."""


class HostedSampler:
    """What a worker that samples can be asked for."""

    def __init__(self, policy: Policy, sampler: Sampler) -> None:
        self._policy = policy
        self._sampler = sampler
        self._group: Any = None
        self._abandoned: list[Any] = []  # closing one would wait for whoever it still waits for
        self._leaves = threading.Event()

    def join(self, store: str, rank: int, size: int) -> None:
        """Meet the first process and the other samplers."""
        self._group = None
        self._leaves.clear()
        host = own_host(alone=not store.startswith(TCP))
        try:
            self._group = open_group(store, rank=rank, size=size, host=host)
        except RuntimeError as error:
            raise GroupLostError(str(error)) from error

    @torch.no_grad()
    def load(self, weights: Weights) -> Loaded:
        """Receive the weights that are sent, and use them."""
        try:
            for parameter in trained(self._policy.lm).values():
                arrived = torch.empty_like(parameter, device="cpu")
                self._wait(self._group.broadcast(arrived, 0))
                parameter.copy_(arrived)
        except RuntimeError as error:
            self._abandoned.append(self._group)
            self._group = None
            raise GroupLostError(str(error)) from error
        return self._sampler.load(weights)

    def leave(self) -> None:
        """Let the thread that waits for weights wait no longer: somebody of the group is gone.

        A host that lost its power or its cable does not say goodbye.
        """
        self._leaves.set()

    def _wait(self, arriving: Any) -> None:
        while True:
            try:
                arriving.wait(LOOK_EVERY)
            except RuntimeError:
                if arriving.is_completed() or self._leaves.is_set():
                    raise
            else:
                return

    def sample(self, prompts: Sequence[Prompt], step: int) -> list[list[Rollout]]:
        """Return the group of each prompt."""
        return list(self._sampler.sample(prompts, step=step))

    def extend(self, rollouts: Sequence[Rollout], step: int) -> list[Rollout]:
        """Let the policy go on behind the segments of each rollout."""
        return self._sampler.extend(rollouts, step=step)

    def close(self) -> None:
        """Let go of an engine, if there is one."""
        self._sampler.close()
