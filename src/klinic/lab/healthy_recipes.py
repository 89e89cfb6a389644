"""Healthy recipes, some unusual, on which the doctor must name no cause."""

from collections.abc import Iterator, Mapping
from typing import Any

SEEDS = 2

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
}
"""Settings by name, on top of those of a trial."""


def healthy_runs() -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Yield name, seed and settings of every healthy run."""
    for seed in range(SEEDS):
        for name, settings in VARIANTS.items():
            yield name, seed, settings
