"""A sampler inside a worker: it receives weights into a policy of its own and samples with them."""

from collections.abc import Sequence

from klinic.cluster.links import GroupLostError, Link, open_link
from klinic.evidence.rollout import Prompt, Rollout
from klinic.model.loading import Policy
from klinic.model.weights import Weights, trained
from klinic.sampler.protocol import Loaded, Sampler


class HostedSampler:
    """What a worker that samples can be asked for."""

    def __init__(self, policy: Policy, sampler: Sampler) -> None:
        self._policy = policy
        self._sampler = sampler
        self._link: Link | None = None
        self._abandoned: list[Link] = []  # closing one would wait for whoever it still waits for

    def join(self, store: str, rank: int, size: int) -> None:
        """Open this end of a link to the first process."""
        self._link = None
        self._link = open_link(store, trained(self._policy.lm), rank=rank, size=size)

    def load(self, weights: Weights) -> Loaded:
        """Receive the weights that are sent, and use them."""
        link = self._link
        if link is None:
            raise GroupLostError("there is no link to receive weights over")
        try:
            link.receive(trained(self._policy.lm))
        except GroupLostError:
            self._abandoned.append(link)
            self._link = None
            raise
        return self._sampler.load(weights)

    def leave(self) -> None:
        """Wait for weights no longer."""
        if self._link is not None:
            self._link.leave()

    def sample(self, prompts: Sequence[Prompt], step: int) -> list[list[Rollout]]:
        """Return the group of each prompt."""
        return list(self._sampler.sample(prompts, step=step))

    def extend(self, rollouts: Sequence[Rollout], step: int) -> list[Rollout]:
        """Let the policy go on behind the segments of each rollout."""
        return self._sampler.extend(rollouts, step=step)

    def close(self) -> None:
        """Let go of an engine, if there is one."""
        self._sampler.close()
