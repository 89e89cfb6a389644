"""The sampler interface that the training loop calls, for local and remote samplers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from klinic.evidence.record import ProbeResult
from klinic.evidence.rollout import Prompt, Rollout
from klinic.model.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Result of loading weights into a sampler."""

    fingerprint: str
    """Fingerprint of the weights now in use; with `damage`, of those that were sent."""
    sync_gaps: dict[str, float] = field(default_factory=dict)
    """Log-prob gap to the policy, for samplers with their own weights: `probes.sampler_sync`."""
    damage: str = ""
    """What is wrong with the tensors that arrived; empty if they are those that were sent."""

    @property
    def probe_result(self) -> ProbeResult:
        """The fields of the probe `sampler_sync`; empty for a sampler on the learner's weights."""
        return {**self.sync_gaps, **({"damage": self.damage} if self.damage else {})}


@runtime_checkable
class Sampler(Protocol):
    """Samples completions with the weights that were loaded last."""

    def load(self, weights: Weights) -> LoadResult:
        """Load weights; return the fingerprint of the weights now in use."""

    def sample(self, prompts: Sequence[Prompt], *, step: int) -> Iterator[list[Rollout]]:
        """Yield the group of each prompt as soon as its last completion is finished."""

    def extend(self, rollouts: Sequence[Rollout], *, step: int) -> list[Rollout]:
        """Continue each rollout after its last segment."""

    def greedy(self) -> "Sampler":
        """Return a sampler of the most likely completion of each prompt, on the same weights.

        It is used until the next `load`.
        """

    def close(self) -> None:
        """Release resources such as an engine process."""


@runtime_checkable
class SleepingSampler(Protocol):
    """A sampler that can release its GPU memory between two loads; others need no such method."""

    def sleep(self) -> None:
        """Release GPU memory until the next `load`."""


def release_sampler_memory(sampler: Sampler) -> None:
    """Let a sampler that shares the learner's GPU release its memory until the next `load`."""
    if isinstance(sampler, SleepingSampler):
        sampler.sleep()
