"""Evaluates a policy on held-out rows and measures its exact KL to the reference."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from klinic.evidence.rollout import Rollout, flatten
from klinic.loop.data import make_prompt
from klinic.loop.reading import Row
from klinic.model.chat import PromptEncoder
from klinic.model.layout import lay_out
from klinic.model.loading import Policy
from klinic.model.reference import Reference
from klinic.rewards.function import Reward
from klinic.rewards.runner import score
from klinic.rewards.scores import mean
from klinic.sampler.conversation import Conversing, Reply
from klinic.sampler.drawing import Drawing
from klinic.sampler.protocol import Sampler
from klinic.sampler.transformers import TransformersSampler
from klinic.tasks.base import Task

BATCH = 256  # rows
GREEDY = Drawing(temperature=0.0)

Answers = dict[str, list[Rollout]]
"""Completions of held-out rows, by skill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Held-out rows and the rewards that grade their completions."""

    rows: Sequence[Row]
    rewards: Sequence[Reward]


def complete(
    policy: Policy,
    rows: Sequence[Row],
    *,
    max_new_tokens: int,
    how: Drawing = GREEDY,
    reply: Reply | None = None,
) -> list[Rollout]:
    """Return one completion of each row, greedy by default."""
    encoder = PromptEncoder(policy.tokenizer, policy.name)
    sampler: Sampler = TransformersSampler(
        policy, how=how, max_new_tokens=max_new_tokens, group_size=1, seed=0
    )
    if reply is not None:
        sampler = Conversing(sampler, encoder, reply, window=policy.context_window)
    prompts = [make_prompt(row, i, encoder) for i, row in enumerate(rows)]
    found: dict[int, Rollout] = {}
    for start in range(0, len(prompts), BATCH):
        for (rollout,) in sampler.sample(prompts[start : start + BATCH], step=0):
            found[rollout.prompt.index] = rollout
    return [found[i] for i in range(len(prompts))]


def answers(policy: Policy, task: Task, *, num: int, max_new_tokens: int) -> Answers:
    """Return greedy completions of held-out rows, by skill."""
    rows = {skill: task.eval_rows(skill, num) for skill in task.skills}
    return {
        skill: complete(policy, asked, max_new_tokens=max_new_tokens)
        for skill, asked in rows.items()
    }


def accuracy(task: Task, given: Answers) -> dict[str, float]:
    """Return the fraction of correct completions, by skill."""
    return {
        skill: float(np.mean([task.correct(r.prompt.columns, r.text) for r in rollouts]))
        for skill, rollouts in given.items()
    }


def measured(task: Task, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the means of a task's additional measures by metric name."""
    if not task.measures:
        return {}
    rewards = [Reward(name=name, function=task.rewards[name]) for name in task.measures]
    parts = score(rollouts, rewards).parts
    return {f"eval/rewards/{name}": mean(part) for name, part in parts.items()}


def mean_reward(
    policy: Policy, held_out: HeldOut, *, num: int, max_new_tokens: int, reply: Reply | None
) -> float:
    """Return the mean reward of greedy completions of the first rows; NaN if none has a reward."""
    rows = held_out.rows[:num]
    rollouts = complete(policy, rows, max_new_tokens=max_new_tokens, reply=reply)
    return mean_of(rollouts, held_out.rewards)


def mean_of(rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> float:
    """Return the mean reward of completions; NaN if none has a reward."""
    total = score(rollouts, rewards).total
    return float(np.nanmean(total)) if not np.isnan(total).all() else math.nan


def retention(now: Mapping[str, float], before: Mapping[str, float], trained: str) -> float | None:
    """Return the retained accuracy of the untrained skills: 1 means all of it.

    >>> retention({"add": 0.9, "copy": 0.4}, {"add": 0.5, "copy": 0.8}, "add")
    0.5
    """
    others = [skill for skill in before if skill != trained and before[skill] > 0]
    if not others:
        return None
    return float(np.mean([now[skill] / before[skill] for skill in others]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """KL(policy || reference) over the full vocabulary, along completions of the policy."""

    per_token: float
    """Nats, mean over tokens."""
    per_sequence: float
    """Nats, mean over completions."""
    max_token: float
    num_completions: int


@torch.no_grad()
def distance(
    policy: Policy,
    reference: Reference,
    rows: Sequence[Row],
    *,
    max_new_tokens: int,
    reply: Reply | None = None,
) -> Distance:
    """Return the exact KL to the reference on sampled completions, at the policy's temperature."""
    how = Drawing(temperature=policy.scorer.temperature)
    rollouts = complete(policy, rows, max_new_tokens=max_new_tokens, how=how, reply=reply)
    sums, tokens = [], []
    for start in range(0, len(rollouts), BATCH):
        part = rollouts[start : start + BATCH]
        layout = lay_out(
            [r.prompt.token_ids for r in part],
            [r.token_ids for r in part],
            pad_id=policy.pad_id,
            device=policy.scorer.device,
        )
        kl_exact = policy.scorer(layout, reference.hidden(layout)).kl_exact.double().cpu().numpy()
        record = flatten(part, step=0)  # its loss_mask marks the policy's own tokens
        sums += list(np.add.reduceat(kl_exact * record.loss_mask, record.row_offsets[:-1]))
        tokens.append(kl_exact[record.loss_mask])
    every = np.concatenate(tokens)
    return Distance(
        per_token=float(every.mean()),
        per_sequence=float(np.mean(sums)),
        max_token=float(every.max()),
        num_completions=len(rollouts),
    )
