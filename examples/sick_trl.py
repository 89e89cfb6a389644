"""A GRPO run of TRL with a bug: completions come from a second model that is never updated.

    klinic train recipes/arithmetic.yaml loop.max_steps=1 loop.eval_every=0 \\
      warm_start.steps=300 warm_start.batch_size=32 output.dir=runs/first
    python examples/sick_trl.py runs/first/start runs/sick
    klinic diagnose runs/sick

Needs `pip install "klinic[trl]"`, no GPU and no download. `klinic demo --recorded` shows a
recording of this run, without torch.
"""

import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

import klinic


def digits(completions, answer, **_):
    """Return the fraction of right digits of each completion."""
    return [
        sum(map(str.__eq__, completion, right)) / len(right)
        for completion, right in zip(completions, answer, strict=True)
    ]


def make_trainer(start: Path) -> GRPOTrainer:
    """Return a trainer that teaches sums of two-digit numbers to the model in a folder."""
    numbers = range(10, 50)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]
    config = GRPOConfig(
        output_dir="out",
        beta=0.04,
        max_steps=16,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        max_completion_length=8,
        per_device_train_batch_size=64,
        num_generations=8,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    dataset = Dataset.from_list(rows)
    return GRPOTrainer(str(start), reward_funcs=digits, args=config, train_dataset=dataset)


def sample_from_second_model(trainer: GRPOTrainer, start: Path) -> None:
    """Generate by a model of its own. The bug: updates do not reach it."""
    trainer.model.generate = AutoModelForCausalLM.from_pretrained(start).generate


if __name__ == "__main__":
    start, run = Path(sys.argv[1]), Path(sys.argv[2])
    trainer = make_trainer(start)
    sample_from_second_model(trainer, start)
    klinic.attach(trainer, run)
    trainer.train()
