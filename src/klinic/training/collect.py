"""Collects the rollouts of a step: one batch of prompts, or several with dynamic sampling.

A group whose rewards are all equal has zero advantage. With `loop.extra_rounds`, further batches
are sampled to replace such groups (dynamic sampling, as in DAPO). The reported reward covers all
completions; training uses the chosen groups.

Source: Yu et al., "DAPO" (2025), section 3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from klinic.evidence.rollout import Prompt, Rollout
from klinic.recipe.recipe import Recipe
from klinic.rewards.scores import StepRewards, concat_scores, select_scores
from klinic.sampler.protocol import Sampler
from klinic.training.state import PhaseTimer


@runtime_checkable
class RolloutSource(Protocol):
    """The members of a run that rollout collection needs."""

    sampler: Sampler
    recipe: Recipe

    def next_batch_index(self, batch_index: int) -> int:
        """Return the index of the batch after this one; skipped batches are left out."""

    def prompt_batch(self, batch_index: int) -> list[Prompt]:
        """Return a batch of prompts, counted from 1."""

    def score_rollouts(self, rollouts: list[Rollout]) -> StepRewards:
        """Return the rewards of completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """Rollouts with their rewards, and which of them to train on."""

    rollouts: list[Rollout]
    scores: StepRewards
    """Of all rollouts, in order."""
    chosen: list[int]
    """Indices of the rollouts to train on, group by group."""
    batch_indices: tuple[int, ...]
    """Indices of the batches that their prompts come from."""
    num_dropped_groups: int
    """Groups that were sampled and not chosen."""
    kl_only: tuple[int, ...] = ()
    """Rows of `chosen` that are trained on by the KL term alone."""

    @property
    def chosen_scores(self) -> StepRewards:
        """The rewards of the rollouts to train on."""
        return select_scores(self.scores, self.chosen)


def collect_rollouts(
    run: RolloutSource, *, step: int, batch_index: int, timer: PhaseTimer, batch_indices: list[int]
) -> RolloutBatch:
    """Sample and score until enough groups have differing rewards, or no round is left.

    `batch_indices` is extended as batches are taken, so that an error can be attributed to them.
    """
    groups: list[list[Rollout]] = []
    scores: list[StepRewards] = []
    num_wanted = 0
    for _ in range(1 + run.recipe.loop.extra_rounds):
        batch_index = run.next_batch_index(batch_index)
        batch_indices.append(batch_index)
        with timer.time_phase("sample"):
            new_groups = sample_groups(
                run.sampler, _prompts_to_sample(run.prompt_batch(batch_index), groups), step
            )
        if new_groups:
            with timer.time_phase("reward"):
                scores.append(
                    run.score_rollouts([rollout for group in new_groups for rollout in group])
                )
            groups += new_groups
        num_wanted = num_wanted or len(groups)
        is_varied = _has_varied_rewards(groups, concat_scores(scores))
        if sum(is_varied) >= num_wanted:
            break
    chosen = choose_groups(is_varied, num_wanted)
    starts = np.cumsum([0, *(len(group) for group in groups)])
    return RolloutBatch(
        rollouts=[rollout for group in groups for rollout in group],
        scores=concat_scores(scores),
        chosen=[row for g in chosen for row in range(starts[g], starts[g + 1])],
        batch_indices=tuple(batch_indices),
        num_dropped_groups=len(groups) - len(chosen),
    )


def sample_groups(sampler: Sampler, prompts: Sequence[Prompt], step: int) -> list[list[Rollout]]:
    """Return the groups in prompt order, whatever order they finish in."""
    finished = {group[0].prompt.index: group for group in sampler.sample(prompts, step=step)}
    return [finished[prompt.index] for prompt in prompts]


def choose_groups(is_varied: Sequence[bool], num_wanted: int) -> list[int]:
    """Return the first groups with differing rewards, filled up with other groups in order.

    >>> choose_groups([True, False, True, False], 2), choose_groups([False, False, True], 2)
    ([0, 2], [0, 2])
    """
    ranked = sorted(range(len(is_varied)), key=lambda group: not is_varied[group])
    return sorted(ranked[:num_wanted])


def _prompts_to_sample(
    prompts: Sequence[Prompt], groups: Sequence[Sequence[Rollout]]
) -> list[Prompt]:
    """Return the prompts not yet sampled in this step; batches may overlap at an epoch's end."""
    sampled_indices = {group[0].prompt.index for group in groups}
    return [prompt for prompt in prompts if prompt.index not in sampled_indices]


def _has_varied_rewards(groups: Sequence[Sequence[Rollout]], scores: StepRewards) -> list[bool]:
    """Return for each group whether it has two different rewards."""
    ends = np.cumsum([len(group) for group in groups])
    totals = np.split(scores.total, ends[:-1])
    return [len(np.unique(total[~np.isnan(total)])) > 1 for total in totals]
