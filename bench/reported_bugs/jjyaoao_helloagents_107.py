"""HelloAgents #107: the default learning rate of 5e-5 makes the policy collapse.

https://github.com/jjyaoao/HelloAgents/issues/107 (fix #108)

Reported
    Qwen3-0.6B on GSM8K: 57.0% after SFT, 2.4% after one round of GRPO (LoRA of rank 16, the rate
    not given). With 1e-6 and beta 0.001 it converges.
Found
    The rate of SFT, 5e-5, is the default for GRPO too, fifty times the one that works; a rate that
    the caller gives is silently dropped. The author agreed to a rate of GRPO's own.
Rebuilt
    LoRA of rank 16 with beta 0.04, which the report takes for TRL's default, and a rate fifty times
    one that works for adapters of this model.
Seen here, seed 0
    Evaluated accuracy 0.71 before, 0.17 at step 10, 0.004 at 20, 0.03 at 40. kl 0.17 at step 2,
    1.4 at 10, 3 at 20; reward 0 from step 15 on in most steps, frac_reward_zero_std 1.
"""

from pathlib import Path

from bench.reported_bugs import ground

WORKS = 1e-4
TIMES = 50


def train(folder: Path, seed: int) -> None:
    """Train with a learning rate fifty times too high."""
    from peft import LoraConfig
    from trl import GRPOTrainer

    rows = ground.questions()
    trainer = GRPOTrainer(
        str(ground.start(folder)),
        reward_funcs=ground.right,
        args=ground.config(
            folder,
            seed,
            beta=0.04,
            learning_rate=TIMES * WORKS,
            max_steps=40,
            eval_strategy="steps",
            eval_steps=10,
            eval_on_start=True,
            per_device_eval_batch_size=64,
        ),
        train_dataset=ground.dataset(rows),
        eval_dataset=ground.dataset(rows[:32]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    ground.run(trainer, folder, accuracy="right")
