"""NeMo-RL #4158: a spike in the advantage normalised by a leave-one-out spread.

https://github.com/NVIDIA-NeMo/RL/pull/4158 (also #4161, and #1518 before)

Reported
    With use_leave_one_out_baseline and normalize_rewards: advantages/max 7428, loss -26 and
    grad_norm 35 on one step of a run of 32 prompts by 8; other steps are ordinary.
Found
    The spread of the other rewards is sqrt(E[x^2] - E[x]^2) in float32. In a group of seven equal
    rewards that float32 cannot hold (0.95) and one other, the spread that the single one is divided
    by is rounding alone: 4.6e-4 where 0 is meant, so [0, 0.95 x 7] gives it -2075. The guard for 0
    does not see it. Rewards of 0 and 1 cancel exactly.
Rebuilt
    Advantages by that formula in float32, with a reward of 0.95 for the right answer; rows whose
    spread is 0 are not divided. No KL.
Seen here, seed 0
    The largest advantage is 2075.39, to the digit that of the thread, in 9 of 20 steps and 2.3 in
    the others; it comes with a loss of 50 to 130 instead of 0.0 to 0.07, and a grad_norm of 600 to
    2700 instead of 1 to 9.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.reported_bugs import ground

EPSILON = 1e-6


def almost_one(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 0.95 for the right answer."""
    return [0.95 * float(said == want) for said, want in zip(completions, answer, strict=True)]


def leave_one_out(rewards: Tensor, size: int) -> Tensor:
    """Return rewards minus the mean of the others of their group, over the spread of those."""
    grouped, others = rewards.float().view(-1, size), 1 - torch.eye(size)
    mean, mean_square = (power @ others / (size - 1) for power in (grouped, grouped.square()))
    variance = (mean_square - mean.square()) * ((size - 1) / (size - 2))
    spread = variance.sqrt().nan_to_num(0)
    centred = grouped - mean
    return torch.where(spread > 0, centred / (spread + EPSILON), centred).view(-1)


def train(folder: Path, seed: int) -> None:
    """Train on advantages that are divided by what rounding left."""
    from trl import GRPOTrainer

    class LeaveOneOut(GRPOTrainer):  # type: ignore[misc]
        def _calculate_rewards(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            self.rewards = super()._calculate_rewards(*args, **kwargs)
            return self.rewards

        def _generate_and_score_completions(self, inputs):  # type: ignore[no-untyped-def]
            batch = super()._generate_and_score_completions(inputs)
            batch["advantages"] = leave_one_out(self.rewards[:, 0], self.num_generations)
            self._metrics["train"]["advantages/max"].append(batch["advantages"].abs().max().item())
            return batch

    trainer = LeaveOneOut(
        str(ground.start(folder)),
        reward_funcs=almost_one,
        args=ground.config(
            folder,
            seed,
            per_device_train_batch_size=32,
            loss_type="bnpo",
            learning_rate=3e-5,
            max_steps=20,
        ),
        train_dataset=ground.dataset(ground.questions()),
    )
    ground.run(trainer, folder)
