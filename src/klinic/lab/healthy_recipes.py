"""Healthy recipes, some unusual, on which the doctor must name no cause.

The second half are hard negatives: settings with the look of a fault, such as a KL that rises with
the reward, groups with equal rewards of a task that is nearly solved, or one update of two epochs.
"""

from collections.abc import Iterator, Mapping
from typing import Any

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "no KL": {"kl": None},
    "KL watched only": {"kl.coef": 0.0, "kl.monitor_every": 1},
    "coefficient 1": {"kl.coef": 1.0},
    "exact KL": {"kl.estimator": "exact"},
    "k2": {"kl.estimator": "k2"},
    "k3, as most do": {"kl.estimator": "k3"},
    "adapted coefficient": {"kl.controller": "log_pi"},
    "grpo loss": {"learner.loss": "grpo"},
    "dapo loss": {"learner.loss": "dapo"},
    "gspo loss": {"learner.loss": "gspo"},
    "cispo loss": {"learner.loss": "cispo"},
    "divided by the spread": {"learner.advantage": "group_std"},
    "two updates a batch": {"learner.updates_per_batch": 2},
    "micro-batches": {"learner.micro_batch_size": 12},
    "LoRA": {"model.lora_rank": 8, "learner.learning_rate": 3e-3},
    "bf16": {"model.dtype": "bf16"},
    "LoRA in bf16": {
        "model.dtype": "bf16",
        "model.lora_rank": 8,
        "learner.learning_rate": 3e-3,
    },
    "top-p done right": {"sampling.top_p": 0.9},
    "top-k done right": {"sampling.top_k": 10},
    "temperature 0.7": {"sampling.temperature": 0.7},
    "temperature 1.3": {"sampling.temperature": 1.3},
    "fast learning": {
        "kl.coef": 0.0,
        "kl.monitor_every": 1,
        "learner.learning_rate": 1.5e-3,
        "loop.max_steps": 25,
    },
    "slow learning": {"learner.learning_rate": 3e-6},
    "reference resets": {"reference.reset_every": 2},
    "reference average": {"reference.ema": 0.9},
    "binary reward": {"rewards": ["binary"], "warm_start.steps": 600},
    "large groups": {"loop.group_size": 16, "loop.prompts_per_step": 4},
    "groups of two": {"loop.group_size": 2, "loop.prompts_per_step": 32},
    "dynamic sampling": {"loop.extra_rounds": 2},
    "truncated rows masked": {"learner.mask_truncated": True},
    "warm-ups": {"kl.warmup_steps": 4, "learner.reward_warmup_steps": 4},
    "well-trained start": {"warm_start.steps": 600},
    "evaluated often": {"loop.eval_every": 2, "loop.eval_prompts": 50},
    "far from the reference on purpose": {
        "kl.coef": 1e-4,
        "learner.learning_rate": 1e-3,
        "loop.max_steps": 20,
    },
    "nearly solved": {"warm_start.steps": 900, "rewards": ["binary"], "kl.coef": 0.01},
    "nearly solved without KL": {"warm_start.steps": 900, "rewards": ["binary"], "kl": None},
    "sparse reward": {"warm_start.steps": 300, "rewards": ["binary"]},
    "sparse reward in large groups": {
        "warm_start.steps": 300,
        "rewards": ["binary"],
        "loop.group_size": 32,
        "loop.prompts_per_step": 2,
    },
    "one prompt a step": {"loop.prompts_per_step": 1, "loop.group_size": 32},
    "four updates a batch": {"learner.updates_per_batch": 4, "learner.learning_rate": 1e-4},
    "two updates of micro-batches": {
        "learner.updates_per_batch": 2,
        "learner.micro_batch_size": 16,
    },
    "two updates with cispo": {"learner.updates_per_batch": 2, "learner.loss": "cispo"},
    "two updates with LoRA": {
        "learner.updates_per_batch": 2,
        "model.lora_rank": 8,
        "learner.learning_rate": 3e-3,
    },
    "rows of one micro-batch each": {"learner.micro_batch_size": 1, "loop.prompts_per_step": 2},
    "wide upper clip": {"learner.clip_high": 0.4, "learner.updates_per_batch": 2},
    "narrow clip": {"learner.clip_low": 0.01, "learner.clip_high": 0.01},
    "dapo with overlong rows masked": {"learner.loss": "dapo", "learner.mask_truncated": True},
    "grpo with a spread and k3": {
        "learner.loss": "grpo",
        "learner.advantage": "group_std",
        "kl.estimator": "k3",
    },
    "gspo in two updates": {"learner.loss": "gspo", "learner.updates_per_batch": 2},
    "mean of the group": {"learner.advantage": "group_mean"},
    "mean of the group in pairs": {
        "learner.advantage": "group_mean",
        "loop.group_size": 2,
        "loop.prompts_per_step": 32,
    },
    "min-p done right": {"sampling.min_p": 0.1},
    "strong top-p done right": {"sampling.top_p": 0.5},
    "top-k of two done right": {"sampling.top_k": 2},
    "top-p and top-k with a temperature": {
        "sampling.top_p": 0.9,
        "sampling.top_k": 8,
        "sampling.temperature": 0.8,
    },
    "temperature 0.4": {"sampling.temperature": 0.4},
    "temperature 2": {"sampling.temperature": 2.0},
    "bf16 with a temperature": {"model.dtype": "bf16", "sampling.temperature": 0.7},
    "bf16 with top-p": {"model.dtype": "bf16", "sampling.top_p": 0.9},
    "bf16 in micro-batches": {"model.dtype": "bf16", "learner.micro_batch_size": 12},
    "low rank": {"model.lora_rank": 1, "learner.learning_rate": 1e-2},
    "cosine schedule to 0": {"learner.schedule": "cosine", "loop.max_steps": 12},
    "weight decay": {"learner.weight_decay": 0.1},
    "gradients clipped hard": {"learner.max_grad_norm": 0.01},
    "updates tied to the first of their batch": {
        "reference.reset_every": 1,
        "learner.updates_per_batch": 3,
    },
    "rough start": {"warm_start.steps": 100},
}
"""Settings by name, on top of those of a trial."""


def healthy_runs(seeds: int) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Yield name, seed and settings of every healthy run."""
    for seed in range(seeds):
        for name, settings in VARIANTS.items():
            yield name, seed, settings
