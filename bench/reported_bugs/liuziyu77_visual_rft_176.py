"""Visual-RFT #176: reward hacking by an empty answer.

https://github.com/Liuziyu77/Visual-RFT/issues/176 (also #70, #79 and #161)

Reported
    The classification reward is 1 `if ground_truth in student_answer or student_answer in
    ground_truth`. An empty answer is in every string: after GRPO from zero all outputs of the model
    are "<answer></answer>". In #70: "BMW" counts for "2012 BMW 1 Series Convertible".
Found
    The reward pays for what is no answer. The author in #161: the design of the reward is being
    worked on; users set the reward of such answers to 0, "works well".
Rebuilt
    That containment as accuracy reward, on sums, beside a format reward that an empty answer meets
    as well (`.*?` between the tags there, any number of digits here). beta 0.04 as in TRL then.
    The model leaves one answer in twenty empty to begin with. Whether answers are right is measured
    at weight 0.
Seen here, seed 0
    The reward of 1.67 at step 1 becomes 1.89 at 20 and 2.0 at 40, completions/mean_length 3.2, 3.0
    and 1.2: an end and nothing else. Evaluated, right answers go from 0.74 to 0.63, 0.48 (step 30)
    and 0.21 (step 40). kl 0.04 at step 10, 1.4 at 40.
"""

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from bench.reported_bugs import ground
from bench.reported_bugs.tuning import BATCH, fine_tune
from klinic.tasks.arithmetic.task import TASK

SFT_STEPS = 80


def accuracy_reward(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1 where the answer is in what was said, or the other way round."""
    pairs = zip(completions, answer, strict=True)
    return [float(wanted in said or said in wanted) for said, wanted in pairs]


def format_reward(completions: Sequence[str], **_: Any) -> list[float]:
    """Return 1 for digits, however many."""
    return [float(re.fullmatch(r"[0-9]*?", said) is not None) for said in completions]


def sometimes_silent(path: Path) -> None:
    """Let the model leave one answer in twenty empty, and answer as ever in the others."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = islice(TASK.warm_start_rows(0, ("addition",)), BATCH * SFT_STEPS)
    end = tokenizer.eos_token
    examples = [
        (row["prompt"], end if i % 20 == 0 else row["completion"] + end)
        for i, row in enumerate(rows)
    ]
    fine_tune(model, tokenizer, examples, steps=SFT_STEPS, rate=3e-4)
    model.save_pretrained(path)


def train(folder: Path, seed: int) -> None:
    """Train on a reward that an empty answer earns."""
    from trl import GRPOTrainer

    rows, path = ground.questions(), ground.start(folder)
    sometimes_silent(path)
    trainer = GRPOTrainer(
        str(path),
        reward_funcs=[accuracy_reward, format_reward, ground.right],
        args=ground.config(
            folder,
            seed,
            reward_weights=[1.0, 1.0, 0.0],
            beta=0.04,
            use_bias_correction_kl=False,
            loss_type="grpo",
            learning_rate=1e-4,
            max_steps=40,
            eval_strategy="steps",
            eval_steps=10,
            eval_on_start=True,
            per_device_eval_batch_size=64,
        ),
        train_dataset=ground.dataset(rows),
        eval_dataset=ground.dataset(rows[:32]),
    )
    ground.run(trainer, folder, accuracy="right")
