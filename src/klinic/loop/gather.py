"""Collects the rollouts of a step: one batch of prompts, or several with dynamic sampling.

A group whose rewards are all equal has zero advantage. With `loop.extra_rounds`, further batches
are sampled to replace such groups (dynamic sampling, as in DAPO). The reported reward covers all
completions; training uses the chosen groups.

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
    """The members of a run that rollout collection needs."""

    sampler: Sampler
    extra_rounds: int

    def next_place(self, position: int) -> int:
        """Return the index of the batch after this one; skipped batches are left out."""

    def prompts(self, position: int) -> list[Prompt]:
        """Return a batch of prompts, counted from 1."""

    def reward(self, rollouts: list[Rollout]) -> Scores:
        """Return the rewards of completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Rollouts with their rewards, and which of them to train on."""

    rollouts: list[Rollout]
    scores: Scores
    """Of all rollouts, in order."""
    chosen: list[int]
    """Indices of the rollouts to train on, group by group."""
    places: tuple[int, ...]
    """Indices of the batches that their prompts come from."""
    num_dropped: int
    """Groups that were sampled and not chosen."""

    def without(self, rows: Sequence[int]) -> "Gathered":
        """Return a copy without some of the chosen rollouts."""
        out = set(rows)
        return replace(self, chosen=[c for row, c in enumerate(self.chosen) if row not in out])


def gather(
    run: Gathering, *, step: int, position: int, clock: Clock, places: list[int]
) -> Gathered:
    """Sample and score until enough groups have differing rewards, or no round is left.

    `batch_indices` is extended as batches are taken, so that an error can be attributed to them.
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
    """Return the groups in prompt order, whatever order they finish in."""
    ended = {group[0].prompt.index: group for group in sampler.sample(prompts, step=step)}
    return [ended[prompt.index] for prompt in prompts]


def choose(varied: Sequence[bool], wanted: int) -> list[int]:
    """Return the first groups with differing rewards, filled up with other groups in order.

    >>> choose([True, False, True, False], 2), choose([False, False, True], 2)
    ([0, 2], [0, 2])
    """
    ranked = sorted(range(len(varied)), key=lambda group: not varied[group])
    return sorted(ranked[:wanted])


def _unseen(prompts: Sequence[Prompt], groups: Sequence[Sequence[Rollout]]) -> list[Prompt]:
    """Return the prompts not yet sampled in this step; batches may overlap at an epoch's end."""
    seen = {group[0].prompt.index for group in groups}
    return [prompt for prompt in prompts if prompt.index not in seen]


def _varied(groups: Sequence[Sequence[Rollout]], scores: Scores) -> list[bool]:
    """Return for each group whether it has two different rewards."""
    ends = np.cumsum([len(group) for group in groups])
    totals = np.split(scores.total, ends[:-1])
    return [len(np.unique(total[~np.isnan(total)])) > 1 for total in totals]
