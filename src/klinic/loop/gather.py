"""The completions of a step: one batch of prompts, or as many as it takes to learn something.

A group whose rewards are all equal has no advantage anywhere. With `loop.extra_rounds`, further
batches are sampled in its place (dynamic sampling, as in DAPO). What is reported as the reward is
that of all completions; what is trained on is chosen.

Source: Yu et al., "DAPO" (2025), section 3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from klinic.evidence.rollout import Prompt, Rollout
from klinic.loop.clock import Clock
from klinic.rewards.scores import Scores, joined
from klinic.sampler.protocol import Sampler


@runtime_checkable
class Gathering(Protocol):
    """What is needed of a run."""

    sampler: Sampler
    extra_rounds: int

    def next_place(self, position: int) -> int:
        """Return the place of the data after this one; batches may be left out."""

    def prompts(self, position: int) -> list[Prompt]:
        """Return the batch of prompts at a place of the data, counted from 1."""

    def reward(self, rollouts: list[Rollout]) -> Scores:
        """Return what reward functions say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Completions with their scores, and which of them to train on."""

    rollouts: list[Rollout]
    scores: Scores
    """Of all of them, in order."""
    chosen: list[int]
    """The numbers of those to train on, group by group."""
    places: tuple[int, ...]
    """Where in the data their prompts stand."""
    num_dropped: int
    """Groups that were sampled and left out."""

    def without(self, rows: Sequence[int]) -> "Gathered":
        """Return the same with some of the chosen completions left out."""
        out = set(rows)
        return replace(self, chosen=[c for row, c in enumerate(self.chosen) if row not in out])


def gather(
    run: Gathering, *, step: int, position: int, clock: Clock, places: list[int]
) -> Gathered:
    """Sample and score until enough groups have something to compare, or no round is left.

    `places` is filled as batches are taken, so that it is known where an error came from.
    """
    groups: list[list[Rollout]] = []
    scores: list[Scores] = []
    wanted = 0
    for _ in range(1 + run.extra_rounds):
        position = run.next_place(position)
        places.append(position)
        with clock.over("sample"):
            fresh = sample_groups(run.sampler, _unseen(run.prompts(position), groups), step)
        if fresh:
            with clock.over("reward"):
                scores.append(run.reward([rollout for group in fresh for rollout in group]))
            groups += fresh
        wanted = wanted or len(groups)
        varied = _varied(groups, joined(scores))
        if sum(varied) >= wanted:
            break
    chosen = choose(varied, wanted)
    starts = np.cumsum([0, *(len(group) for group in groups)])
    return Gathered(
        rollouts=[rollout for group in groups for rollout in group],
        scores=joined(scores),
        chosen=[row for g in chosen for row in range(starts[g], starts[g + 1])],
        places=tuple(places),
        num_dropped=len(groups) - len(chosen),
    )


def sample_groups(sampler: Sampler, prompts: Sequence[Prompt], step: int) -> list[list[Rollout]]:
    """Return the groups in the order of their prompts, whichever ended first."""
    ended = {group[0].prompt.index: group for group in sampler.sample(prompts, step=step)}
    return [ended[prompt.index] for prompt in prompts]


def choose(varied: Sequence[bool], wanted: int) -> list[int]:
    """Return the first groups with something to compare, filled up with others in their order.

    >>> choose([True, False, True, False], 2), choose([False, False, True], 2)
    ([0, 2], [0, 2])
    """
    ranked = sorted(range(len(varied)), key=lambda group: not varied[group])
    return sorted(ranked[:wanted])


def _unseen(prompts: Sequence[Prompt], groups: Sequence[Sequence[Rollout]]) -> list[Prompt]:
    """Return the prompts that are not in this step yet; where an epoch ends, some may be."""
    seen = {group[0].prompt.index for group in groups}
    return [prompt for prompt in prompts if prompt.index not in seen]


def _varied(groups: Sequence[Sequence[Rollout]], scores: Scores) -> list[bool]:
    """Tell which groups hold two different rewards."""
    ends = np.cumsum([len(group) for group in groups])
    totals = np.split(scores.total, ends[:-1])
    return [len(np.unique(total[~np.isnan(total)])) > 1 for total in totals]
