"""Trainers of TRL around a policy of a few thousand weights."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from klinic.lab.scoreboard_run import TRIAL_SETTINGS
from klinic.model.tiny import tiny_tokenizer
from klinic.recipe.loading import from_keywords
from klinic.training.build import start_policy
from klinic.training.run_folder import START_FOLDER
from klinic.training.source import PythonInputs, load_task_data
from tiny_policies import small_model

PROMPTS = [f"{a}+{b}=" for a in range(2, 6) for b in range(10, 14)]
LONGEST = 6
PARTS = ("model", "rollout_func", "processing_class", "tools", "environment_factory")
"""Arguments of the trainer itself; all others are its config's."""


def characters(completions, **_):
    """Something to learn for a model that knows nothing."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def save_start(folder: Path, **config: Any) -> Path:
    """Write the small model where TRL can load it; without dropout unless that is asked for."""
    still = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    # far from uniform, or the doctor would rightly call its weights random
    opinions = {"initializer_range": 0.6}
    small_model(**{**still, **opinions, **config}).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def teach_start(folder: Path) -> Path:
    """Write the start of the scoreboard's trials: it writes sums, and ends them."""
    recipe = from_keywords(**TRIAL_SETTINGS).recipe
    start_policy(recipe, folder, load_task_data(recipe, PythonInputs()), Console(quiet=True))
    return folder / START_FOLDER


def make_trainer(start: Path, output: Path, *, peft: bool = False, **settings: Any) -> Any:
    """Return a trainer, on one thread and without anybody to tell."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    how: dict[str, Any] = {
        "output_dir": str(output),
        "seed": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "beta": 0.04,
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": LONGEST,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    parts = {key: settings.pop(key) for key in PARTS if key in settings}
    prompts = settings.pop("prompts", PROMPTS)
    reward = settings.pop("reward", characters)
    dropout = settings.pop("lora_dropout", 0.0)
    if peft:
        from peft import LoraConfig

        parts["peft_config"] = LoraConfig(
            r=4,
            lora_alpha=8,
            lora_dropout=dropout,
            target_modules="all-linear",
            fan_in_fan_out=True,
        )
    torch.manual_seed(0)
    return GRPOTrainer(
        reward_funcs=reward,
        args=GRPOConfig(**{**how, **settings}),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        **{"model": str(start), **parts},
    )


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return copies of all weights."""
    return {name: p.detach().clone() for name, p in trainer.model.state_dict().items()}
