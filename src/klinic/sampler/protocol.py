"""What the loop may ask of a sampler, wherever it runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from klinic.evidence.rollout import Prompt, Rollout
from klinic.model.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a sampler says after it has taken over weights."""

    fingerprint: str
    """Of what is really in use now."""
    answer: dict[str, Any] = field(default_factory=dict)
    """How far it is from the policy, if it has weights of its own: `probes.sampler_sync`."""


@runtime_checkable
class Sampler(Protocol):
    """Completions of prompts, drawn from the weights it was last told to load."""

    def load(self, weights: Weights) -> Loaded:
        """Take over weights; say what is really in use now."""

    def sample(self, prompts: Sequence[Prompt], *, step: int) -> Iterator[list[Rollout]]:
        """Yield the group of each prompt as soon as its last member is finished."""

    def extend(self, rollouts: Sequence[Rollout], *, step: int) -> list[Rollout]:
        """Let the policy go on behind the segments of each rollout."""

    def close(self) -> None:
        """Let go of whatever outlives a call: an engine, if there is one."""
