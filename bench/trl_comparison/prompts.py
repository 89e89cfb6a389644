"""The order of the prompts, and a reward function that holds trainers to it."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from bench.trl_comparison.settings import GROUP, PROMPTS
from klinic.data.prompts import PromptDataset
from klinic.model.chat import PromptEncoder
from klinic.model.tiny import tiny_tokenizer
from klinic.tasks.base import Row

Reward = Callable[..., list[float]]


def rows_by_step(rows: Sequence[Row], *, seed: int, steps: int) -> list[list[Row]]:
    """Return the rows of every step, as klinic deals them out."""
    encode = PromptEncoder(tiny_tokenizer(), "tiny")
    dealt = PromptDataset(rows, encode=encode, prompts_per_step=PROMPTS, seed=seed)
    return [[rows[prompt.index] for prompt in dealt.batch_at(step)] for step in range(1, steps + 1)]


class Watch:
    """A reward function that refuses other prompts than those of the step, and keeps count."""

    def __init__(self, by_step: Sequence[Sequence[Row]], reward: Reward) -> None:
        self._expected = [[row["prompt"] for row in rows for _ in range(GROUP)] for rows in by_step]
        self._reward = reward
        self.means: list[float] = []
        """Mean reward of every step so far."""

    def reward(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> list[float]:
        """Return the rewards of a step."""
        step = len(self.means)
        if step >= len(self._expected) or list(prompts) != self._expected[step]:
            raise AssertionError(
                f"step {step + 1}: the trainer asks for other prompts than the race deals out, so "
                f"its result could not be compared. Asked: {list(prompts)[::GROUP]}."
            )
        rewards = self._reward(prompts=prompts, completions=completions, **columns)
        self.means.append(sum(rewards) / len(rewards))
        return rewards

    def digest(self) -> str:
        """Return a hash of the prompts that were asked for, in their order."""
        asked = self._expected[: len(self.means)]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
