"""The sampler inside a Ray worker: receives weights into its own policy and samples."""

from collections.abc import Sequence

from klinic.cluster.weight_links import GroupLostError, WeightLink, open_link
from klinic.evidence.rollout import Prompt, Rollout
from klinic.model.loading import Policy
from klinic.model.weights import Weights, trainable_tensors
from klinic.sampler.protocol import LoadResult, Sampler


class HostedSampler:
    """A policy with a sampler and a weight link; the driver calls its methods by name."""

    def __init__(self, policy: Policy, sampler: Sampler) -> None:
        self._policy = policy
        self._sampler = sampler
        self._link: WeightLink | None = None
        self._abandoned_links: list[
            WeightLink
        ] = []  # kept: destroying one would block on its dead peers

    def join(self, store: str, rank: int, size: int) -> None:
        """Open this end of the weight link to the driver."""
        self._link = None
        self._link = open_link(store, trainable_tensors(self._policy.lm), rank=rank, size=size)

    def load(self, weights: Weights) -> LoadResult:
        """Receive weights and load them into the sampler."""
        link = self._link
        if link is None:
            raise GroupLostError("there is no link to receive weights from")
        try:
            link.receive(trainable_tensors(self._policy.lm))
        except GroupLostError:
            self._abandoned_links.append(link)
            self._link = None
            raise
        return self._sampler.load(weights)

    def leave(self) -> None:
        """Abort a pending receive."""
        if self._link is not None:
            self._link.leave()

    def sample(self, prompts: Sequence[Prompt], step: int) -> list[list[Rollout]]:
        """Return the group of each prompt."""
        return list(self._sampler.sample(prompts, step=step))

    def extend(self, rollouts: Sequence[Rollout], step: int) -> list[Rollout]:
        """Continue each rollout after its segments."""
        return self._sampler.extend(rollouts, step=step)

    def close(self) -> None:
        """Shut down the engine, if there is one."""
        self._sampler.close()
