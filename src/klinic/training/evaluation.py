"""Evaluates a policy on held-out rows and measures its exact KL to the reference."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from klinic.data.dataset import Row
from klinic.data.prompts import make_prompt
from klinic.evidence.rollout import Rollout, flatten_rollouts
from klinic.model.chat import PromptEncoder
from klinic.model.layout import pad_rows
from klinic.model.loading import Policy
from klinic.model.reference import Reference
from klinic.rewards.function import Reward
from klinic.rewards.runner import score
from klinic.rewards.scores import nan_mean
from klinic.sampler.multi_turn import EnvironmentReply, MultiTurnSampler
from klinic.sampler.protocol import Sampler
from klinic.sampler.token_sampling import GREEDY, SamplingParams
from klinic.sampler.transformers import TransformersSampler
from klinic.tasks.base import Task

EVAL_BATCH_SIZE = 256  # rows

CompleteRows = Callable[[Sequence[Row]], list[Rollout]]
"""Returns one completion of each row."""

CompletionsBySkill = dict[str, list[Rollout]]
"""Completions of held-out rows, by skill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutSet:
    """Held-out rows and the rewards that grade their completions."""

    rows: Sequence[Row]
    rewards: Sequence[Reward]


def complete_rows(sampler: Sampler, encoder: PromptEncoder, rows: Sequence[Row]) -> list[Rollout]:
    """Return one completion of each row, by a sampler with groups of one."""
    prompts = [make_prompt(row, i, encoder) for i, row in enumerate(rows)]
    rollouts_by_index: dict[int, Rollout] = {}
    for start in range(0, len(prompts), EVAL_BATCH_SIZE):
        for (rollout,) in sampler.sample(prompts[start : start + EVAL_BATCH_SIZE], step=0):
            rollouts_by_index[rollout.prompt.index] = rollout
    return [rollouts_by_index[i] for i in range(len(prompts))]


def complete_with(
    policy: Policy,
    *,
    max_new_tokens: int,
    sampling_params: SamplingParams = GREEDY,
    reply: EnvironmentReply | None = None,
) -> CompleteRows:
    """Return a function that completes rows with a policy in this process, greedy by default."""
    encoder = PromptEncoder(policy.tokenizer, policy.name)
    sampler: Sampler = TransformersSampler(
        policy, params=sampling_params, max_new_tokens=max_new_tokens, group_size=1, seed=0
    )
    if reply is not None:
        sampler = MultiTurnSampler(sampler, encoder, reply, window=policy.context_window)
    return partial(complete_rows, sampler, encoder)


def complete_skills(complete: CompleteRows, task: Task, *, num: int) -> CompletionsBySkill:
    """Return completions of the first held-out rows of every skill."""
    return {skill: complete(task.eval_rows(skill, num)) for skill in task.skills}


def skill_accuracies(task: Task, completions: CompletionsBySkill) -> dict[str, float]:
    """Return the fraction of correct completions, by skill."""
    return {
        skill: float(np.mean([task.is_correct(r.prompt.columns, r.text) for r in rollouts]))
        for skill, rollouts in completions.items()
    }


def task_measures(task: Task, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the means of a task's additional measures by metric name."""
    if not task.measures:
        return {}
    rewards = [Reward(name=name, function=task.rewards[name]) for name in task.measures]
    parts = score(rollouts, rewards).parts
    return {f"eval/rewards/{name}": nan_mean(part) for name, part in parts.items()}


def mean_reward(complete: CompleteRows, held_out: HeldOutSet, *, num: int) -> float:
    """Return the mean reward of completions of the first rows; NaN if none has a reward."""
    return mean_total_reward(complete(held_out.rows[:num]), held_out.rewards)


def mean_total_reward(rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> float:
    """Return the mean reward of completions; NaN if none has a reward."""
    total = score(rollouts, rewards).total
    return float(np.nanmean(total)) if not np.isnan(total).all() else math.nan


def retained_fraction(
    now: Mapping[str, float], before: Mapping[str, float], trained_skill: str
) -> float | None:
    """Return the retained accuracy of the untrained skills: 1 means all of it.

    >>> retained_fraction({"add": 0.9, "copy": 0.4}, {"add": 0.5, "copy": 0.8}, "add")
    0.5
    """
    other_skills = [skill for skill in before if skill != trained_skill and before[skill] > 0]
    if not other_skills:
        return None
    return float(np.mean([now[skill] / before[skill] for skill in other_skills]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceKL:
    """KL(policy || reference) over the full vocabulary, along completions of the policy."""

    per_token: float
    """Nats, mean over tokens."""
    per_sequence: float
    """Nats, mean over completions."""
    max_token: float
    num_completions: int


@torch.no_grad()
def kl_to_reference(
    policy: Policy,
    reference: Reference,
    rows: Sequence[Row],
    *,
    max_new_tokens: int,
    reply: EnvironmentReply | None = None,
) -> ReferenceKL:
    """Return the exact KL to the reference on sampled completions, at the policy's temperature."""
    sampling_params = SamplingParams(temperature=policy.scorer.temperature)
    complete = complete_with(
        policy, max_new_tokens=max_new_tokens, sampling_params=sampling_params, reply=reply
    )
    rollouts = complete(rows)
    sequence_kls, token_kls = [], []
    for start in range(0, len(rollouts), EVAL_BATCH_SIZE):
        batch = rollouts[start : start + EVAL_BATCH_SIZE]
        layout = pad_rows(
            [r.prompt.token_ids for r in batch],
            [r.token_ids for r in batch],
            pad_id=policy.pad_id,
            device=policy.scorer.device,
        )
        kl_exact = policy.scorer(layout, reference.hidden(layout)).kl_exact.double().cpu().numpy()
        record = flatten_rollouts(batch, step=0)  # its loss_mask marks the policy's own tokens
        sequence_kls += list(np.add.reduceat(kl_exact * record.loss_mask, record.row_offsets[:-1]))
        token_kls.append(kl_exact[record.loss_mask])
    all_token_kls = np.concatenate(token_kls)
    return ReferenceKL(
        per_token=float(all_token_kls.mean()),
        per_sequence=float(np.mean(sequence_kls)),
        max_token=float(all_token_kls.max()),
        num_completions=len(rollouts),
    )
