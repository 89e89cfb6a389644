"""open-r1 #239: why does the loss start at 0, and then possibly increase?

https://github.com/huggingface/open-r1/issues/239 (the same question: TRL #2703)

Reported
    The loss is 0.0 at first and then rises (0.0007 with a KL of 0.018, 0.0019 with 0.049), while
    rewards slowly increase. The reporter wonders whether something is forgotten in the loss.
Found
    A maintainer: "it is completely normal for the loss to start at zero and then increase".
    Advantages are centred and the ratio is 1, so the value of the loss is beta times the KL, which
    begins at 0 and grows as the policy learns.
Rebuilt
    An unmodified run: rewards for accuracy and format, beta 0.04 and the loss of TRL at the time,
    two accumulated batches a step. Nothing is wrong with it.
Seen here, seed 0
    loss 0.0 and kl 0.0 at step 1, 0.0004 and 0.009 at 6, 0.0013 and 0.030 at 12, 0.0061 and 0.17 at
    30: the loss is beta times the KL. grad_norm 1.6 to 4.3; right answers 0.41 to 0.84.
"""

from pathlib import Path

from bench.reported_bugs import ground


def train(folder: Path, seed: int) -> None:
    """Train a healthy run whose loss begins at 0 and rises."""
    from trl import GRPOTrainer

    trainer = GRPOTrainer(
        str(ground.start(folder)),
        reward_funcs=[ground.right, ground.digits],
        args=ground.config(
            folder,
            seed,
            beta=0.04,
            learning_rate=3e-5,
            loss_type="grpo",
            use_bias_correction_kl=False,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=2,
            max_steps=30,
        ),
        train_dataset=ground.dataset(ground.questions()),
    )
    ground.run(trainer, folder)
