"""What the loop may ask of a sampler, wherever it runs."""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from klinic.evidence.rollout import Prompt, Rollout
from klinic.model.weights import Weights


@runtime_checkable
class Sampler(Protocol):
    """Completions of prompts, drawn from the weights it was last told to load."""

    def load(self, weights: Weights) -> str:
        """Take over weights; return the fingerprint of what is really in use now."""

    def sample(self, prompts: Sequence[Prompt], *, step: int) -> Iterator[list[Rollout]]:
        """Yield the group of each prompt as soon as its last member is finished."""

    def extend(self, rollouts: Sequence[Rollout], *, step: int) -> list[Rollout]:
        """Let the policy go on behind the segments of each rollout."""

    def close(self) -> None:
        """Let go of whatever outlives a call: an engine, if there is one."""
