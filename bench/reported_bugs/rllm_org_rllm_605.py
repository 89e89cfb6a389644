"""rLLM #605: GRPO groups by trajectory.uid instead of prompt.

https://github.com/rllm-org/rllm/issues/605 (fixes #667, #776, #924)

Reported
    Before compute_advantage the uid of rows is set to step_ids, which is a fresh id for each
    trajectory: 4 rollouts of one prompt have 4 distinct ids and are not compared with one another.
Found
    Each repeat is a group of its own and meets verl's branch for groups of one (mean 0, std 1):
    rewards of [1, 0, 1, 0] become advantages of about [1, 0, 1, 0] "instead of centered
    advantages", the raw reward, "equivalent to REINFORCE", without any baseline.
Rebuilt
    4 completions a prompt, a reward of 0 or 1, no KL. The advantages of a batch are its rewards
    minus 0, over 1 + 1e-6.
Seen here, seed 0
    The loss is minus the mean reward (-0.77 at a reward of 0.75, -0.42 at 0.44) instead of about
    0; grad_norm 0.5 to 2.5. No advantage is negative. The reward stays at 0.44 to 0.80.
"""

from pathlib import Path

from bench.reported_bugs import ground

EPSILON = 1e-6


def train(folder: Path, seed: int) -> None:
    """Train on advantages within groups of one."""
    from trl import GRPOTrainer

    class Alone(GRPOTrainer):  # type: ignore[misc]
        def _calculate_rewards(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            self.rewards = super()._calculate_rewards(*args, **kwargs)
            return self.rewards

        def _generate_and_score_completions(self, inputs):  # type: ignore[no-untyped-def]
            batch = super()._generate_and_score_completions(inputs)
            mean, spread = 0.0, 1.0
            batch["advantages"] = (self.rewards[:, 0] - mean) / (spread + EPSILON)
            return batch

    trainer = Alone(
        str(ground.start(folder)),
        reward_funcs=ground.right,
        args=ground.config(
            folder,
            seed,
            num_generations=4,
            loss_type="bnpo",
            learning_rate=3e-5,
            max_steps=20,
        ),
        train_dataset=ground.dataset(ground.questions()),
    )
    ground.run(trainer, folder)
