"""The settings of a run in the words of both trainers, and what remains unequal.

Every setting that changes what is learnt is written out on both sides, defaults included: a default
that moves in a later version moves no result.
"""

from pathlib import Path
from typing import Any

from bench.trl_comparison.entry import Entry

PROMPTS = 8  # of a step
GROUP = 8  # completions of a prompt
LONGEST = 8  # tokens of a completion
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0
CLIP = 0.2
TEMPERATURE = 1.0

UNEQUAL = (
    "Random numbers: klinic draws every completion from a stream of its own, TRL all from torch's "
    "generator. The distributions are the same, the completions are not: equal seeds pair the "
    "prompts, not the luck.",
    "The KL term: klinic's `unbiased` is sg(w * k1) * logp; TRL's is k3 times the ratio to the "
    "sampling policy (use_bias_correction_kl, its default). On policy, as here, the gradients are "
    "equal: k1 times that of logp.",
    "Rounding: batches are padded in different ways, and TRL clips to max_grad_norm / (norm + "
    "1e-6).",
    "Beside training: klinic writes a record of every token of every step, TRL an entry of its "
    "log.",
)


def for_klinic(entry: Entry, output: Path) -> dict[str, Any]:
    """Return the keys of a recipe."""
    return {
        "seed": entry.seed,
        "threads": 1,
        "model.dtype": "fp32",
        "kl.coef": entry.coef,
        "kl.estimator": "unbiased",
        "sampling.temperature": TEMPERATURE,
        "sampling.top_p": 1.0,
        "sampling.top_k": 0,
        "sampling.min_p": 0.0,
        "sampling.max_new_tokens": LONGEST,
        "loop.max_steps": entry.steps,
        "loop.prompts_per_step": PROMPTS,
        "loop.group_size": GROUP,
        "loop.checkpoint_every": 0,
        "learner.loss": "dr_grpo",
        "learner.advantage": "group_mean",
        "learner.clip_low": CLIP,
        "learner.clip_high": CLIP,
        "learner.learning_rate": LEARNING_RATE,
        "learner.schedule": "constant",
        "learner.warmup_steps": 0,
        "learner.weight_decay": 0.0,
        "learner.max_grad_norm": MAX_GRAD_NORM,
        "learner.updates_per_batch": 1,
        "learner.micro_batch_size": PROMPTS * GROUP,
        "learner.mask_truncated": False,
        "output.dir": str(output),
        "output.trackers": [],
        "output.doctor": "none",  # what is raced is training
    }


def for_trl(entry: Entry, output: Path) -> dict[str, Any]:
    """Return the arguments of a `GRPOConfig`."""
    return {
        "seed": entry.seed,
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "beta": entry.coef,
        "use_bias_correction_kl": True,
        "temperature": TEMPERATURE,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "max_completion_length": LONGEST,
        "max_steps": entry.steps,
        "per_device_train_batch_size": PROMPTS * GROUP,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP,
        "shuffle_dataset": False,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "epsilon": CLIP,
        "epsilon_high": CLIP,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "optim": "adamw_torch_fused",
        # those of torch.optim.AdamW, which klinic takes
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "num_iterations": 1,
        "mask_truncated_completions": False,
        # costs time and saves memory, which a model of a million weights does not need
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "output_dir": str(output),
    }
