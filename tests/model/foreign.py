"""Adapters as other programs write them: PEFT's own, of many kinds, moved away from their start."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from klinic.learner.checkpoint import save_model
from klinic.model.loading import load_policy
from klinic.recipe.sections import ModelSection

ATTENTION = ["q_proj", "v_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"lora_dropout": 0.1},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True, "lora_dropout": 0.1},
    "own_head": {"modules_to_save": ["lm_head"]},
    "own_norm": {"modules_to_save": ["norm"]},
    "ranks": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 5}},
    "one_layer": {"layers_to_transform": [1]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
}


def write_base(folder: Path) -> Path:
    """Write the tiny model, as a base to put adapters on."""
    policy = load_policy(ModelSection(name="tiny"), temperature=1.0, seed=0)
    save_model(folder, policy)
    return folder


def write_adapter(folder: Path, base: Path, *, by: float = 0.1, **config: Any) -> Path:
    """Write an adapter that has been trained: every weight of it is off its start."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        settings = {"r": 2, "target_modules": ATTENTION, "task_type": "CAUSAL_LM", **config}
        lm = get_peft_model(lm, LoraConfig(**settings))
        with torch.no_grad():
            for p in lm.parameters():
                if p.requires_grad:
                    p.add_(by * torch.randn_like(p))
    lm.save_pretrained(folder, save_embedding_layers=False)
    return folder


def policy_of(name: Path, **section: Any) -> Any:
    """Return a model folder as a policy."""
    return load_policy(ModelSection(name=str(name), **section), temperature=1.0, seed=0)


def move(policy: Any, by: float = 0.1) -> None:
    """Change what is trained, as an update would."""
    with torch.no_grad():
        for p in policy.lm.parameters():
            if p.requires_grad:
                p.add_(by)
