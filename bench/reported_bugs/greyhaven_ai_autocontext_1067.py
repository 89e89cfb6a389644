"""autocontext #1067: truncation zeroed all rewards.

https://github.com/greyhaven-ai/autocontext/pull/1067

Reported
    GRPO on GSM8K learns nothing: completions/mean_length 256, clipped_ratio 1,
    mean_terminated_length 0, reward 0, reward_std 0, frac_reward_zero_std 1, loss 0, grad_norm 0.
Found
    Every completion is cut at max_completion_length, 256 by default, before it comes to its
    "Answer: N", so the exact verifier gives all of them 0: no variance, no advantage, no gradient.
    Raised to 512.
Rebuilt
    Numerals of four digits are to be reversed, which takes five tokens with the end, and
    max_completion_length is 3. The verifier is exact. beta is 0, TRL's default.
Seen here, seed 0
    In every step: completions/mean_length 3, clipped_ratio 1, reward 0, reward_std 0,
    frac_reward_zero_std 1, loss 0, grad_norm 0.
"""

from pathlib import Path

from bench.reported_bugs import ground


def train(folder: Path, seed: int) -> None:
    """Train with a limit that no right answer fits in."""
    from trl import GRPOTrainer

    trainer = GRPOTrainer(
        str(ground.start(folder)),
        reward_funcs=ground.right,
        args=ground.config(folder, seed, max_completion_length=3, learning_rate=3e-5, max_steps=10),
        train_dataset=ground.dataset(ground.questions("reversing")),
    )
    ground.run(trainer, folder)
