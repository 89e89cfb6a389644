"""Checks the Python objects of a `klinic.train(...)` call: model, adapter, rewards, callbacks.

Every problem is collected, so that one error lists all of them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from klinic.recipe.aliases import ALIASES, REFUSED
from klinic.recipe.keys import edit_distance, recipe_fields, recipe_sections
from klinic.recipe.trl_tables import NO_DROPOUT
from klinic.recipe.validation_messages import format_value
from klinic.training.given_model import given_model_problems

UNAVAILABLE = {
    "tokenizer": "its name is processing_class",
    "reward_processing_classes": "reward models are not loaded here. Write a function that calls "
    "the reward model, and pass it in reward_funcs",
    "optimizers": "klinic trains with AdamW. Set learning_rate, adam_beta1, adam_beta2, "
    "weight_decay and lr_scheduler_type",
    "quantization_config": "a quantized base would give the learner and the sampler other "
    "log-probs. Leave it out; bf16=True with peft_config stores the frozen base in bf16",
    "tools": "write a function that answers a turn, and name it: "
    "sampling={'reply': 'my_tools.py:reply'}",
    "rollout_func": "klinic samples by itself, so that every log-prob is that of the policy. For "
    "several turns name a function: sampling={'reply': 'my_tools.py:reply'}",
    "environment_factory": "write a function that answers a turn, and name it: "
    "sampling={'reply': 'my_env.py:reply'}",
    "compute_metrics": "held-out rows are scored by rewards: eval={'rewards': [...]}",
    "data_collator": "rows are encoded by klinic. Put what a reward needs into columns",
    "preprocess_logits_for_metrics": "held-out rows are scored by rewards: eval={'rewards': [...]}",
}
"""Arguments of `GRPOTrainer` that cannot be had, each with what to do instead."""

# fields of a LoraConfig that change nothing, or that have a counterpart
LORA_FIELDS = frozenset(
    {
        *("r", "lora_alpha", "target_modules", "lora_dropout", "task_type", "peft_type"),
        *("auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "fan_in_fan_out", "runtime_config", "loftq_config", "eva_config"),
    }
)
MAX_EDITS = 2  # letters in which a misspelt argument differs from the right one
MODEL_METHODS = ("save_pretrained", "get_output_embeddings", "config")


@dataclass(slots=True, kw_only=True)
class Reading:
    """Settings read from Python objects, with what has no effect and what cannot be had."""

    settings: dict[str, Any] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def take_unavailable(settings: dict[str, Any], reading: Reading) -> None:
    """Remove the arguments of `GRPOTrainer` that cannot be had; each that is set is a problem."""
    for name, advice in UNAVAILABLE.items():
        value = settings.pop(name, None)
        if value is not None and value not in ([], {}, (None, None)):
            reading.problems.append(f"{name} is not available: {advice}.")


def take_misspelt(settings: dict[str, Any], arguments: Collection[str], reading: Reading) -> None:
    """Remove names that are nearly those of an argument; each is a problem with the right name."""
    known = {*ALIASES, *REFUSED, *recipe_fields(), *recipe_sections(), *arguments}
    for name in settings.keys() - known:
        distances = {right: edit_distance(name, right) for right in {*arguments, *ALIASES}}
        near = min(distances, key=lambda right: (distances[right], right))
        if distances[near] <= min(MAX_EDITS, len(name) // 4):
            reading.problems.append(f"{name} is not an argument. Did you mean {near}?")
            del settings[name]


def read_model(model: Any, tokenizer: Any, reading: Reading) -> Any | None:
    """Set the name of the model; return the model if it is an object in memory."""
    if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
        reading.problems.append(
            f"processing_class is {format_value(tokenizer)}: it must be a tokenizer, such as "
            "AutoTokenizer.from_pretrained returns. klinic trains text models."
        )
    if isinstance(model, str | PathLike):
        reading.settings["model.name"] = str(model)
        return None
    if not all(hasattr(model, name) for name in MODEL_METHODS):
        reading.problems.append(
            f"model is {format_value(model)}: it must be a folder, a hub id, `tiny`, or a causal "
            "language model that from_pretrained or get_peft_model returned."
        )
        reading.settings["model.name"] = "tiny"  # to find the other problems
        return None
    reading.problems += given_model_problems(model, tokenizer)
    reading.settings["model.name"] = _object_name(model)
    return model


def _object_name(model: Any) -> str:
    """Return the name that a model in memory came with, for the folder and the card of the run."""
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return name if name.isprintable() else type(model).__name__


def read_adapter(config: Any, model: Any, reading: Reading) -> None:
    """Set the keys of a `LoraConfig`."""
    if config is None:
        return
    if str(getattr(config, "peft_type", "")).rpartition(".")[2] != "LORA":
        reading.problems.append(
            f"peft_config is {format_value(config)}: klinic trains only low-rank adapters. Pass a "
            "peft.LoraConfig."
        )
        return
    if hasattr(model, "peft_config"):
        reading.problems.append(
            "peft_config is set, and the model has an adapter already. Leave one of them out."
        )
        return
    targets = _target_modules(config, model, reading)
    reading.settings |= {"model.lora_rank": config.r, "model.lora_alpha": config.lora_alpha}
    if targets is not None:
        reading.settings["model.lora_target_modules"] = targets
    if config.lora_dropout:
        reading.unused[f"lora_dropout {config.lora_dropout}"] = NO_DROPOUT
    if changed := sorted(_other_fields(config)):
        reading.problems.append(
            f"peft_config sets {', '.join(changed)}, which klinic does not set on a new adapter. "
            "Make the adapter with PEFT, and pass model=get_peft_model(model, peft_config)."
        )


def _other_fields(config: Any) -> list[str]:
    """Return the fields of a LoraConfig that are not the default and have no counterpart."""
    default = type(config)()
    return [
        name
        for name, value in vars(config).items()
        if name not in LORA_FIELDS and value != getattr(default, name, None)
    ]


def _target_modules(config: Any, model: Any, reading: Reading) -> list[str] | None:
    """Return the names of the layers that get an adapter; None for all linear ones."""
    targets = config.target_modules
    if targets is None:
        return _usual_targets(model)
    if targets == "all-linear":
        return None
    if isinstance(targets, str):
        reading.problems.append(
            f"peft_config.target_modules is {format_value(targets)}, a pattern: klinic takes a "
            "list of names, or 'all-linear'. Pass model=get_peft_model(model, peft_config) to use "
            "a pattern."
        )
        return None
    return sorted(targets)


def _usual_targets(model: Any) -> list[str] | None:
    """Return the layers that PEFT adapts in this architecture if none are named."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    model_type = _model_type(model)
    return list(USUAL[model_type]) if model_type in USUAL else None


def _model_type(model: Any) -> str | None:
    config = getattr(model, "config", None)
    if config is None:
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(model)
        except (OSError, ValueError):  # a built-in model, or a folder that cannot be read
            return None
    return getattr(config, "model_type", None)


def read_rewards(
    functions: Any, weights: Sequence[float] | None, reading: Reading
) -> list[tuple[Callable[..., Any], float]]:
    """Return reward functions with their weights; named ones become entries of the recipe."""
    entries = as_list(functions)
    if weights is not None and len(weights) != len(entries):
        reading.problems.append(
            f"reward_weights has {len(weights)} numbers for {len(entries)} reward functions. Give "
            "one weight per function, in the same order."
        )
        weights = None
    pairs: list[tuple[Callable[..., Any], float]] = []
    named: list[Any] = []
    for entry, weight in zip(entries, weights or [1.0] * len(entries), strict=True):
        if isinstance(entry, str) and (":" in entry or "/" not in entry):
            named.append({"function": entry, "weight": float(weight)} if weights else entry)
        elif isinstance(entry, Mapping):
            named.append(entry)
        elif callable(entry) and not hasattr(entry, "forward"):
            pairs.append((entry, float(weight)))
        else:
            reading.problems.append(_explain_reward(entry))
    if named:
        reading.settings["rewards"] = named
    return pairs


def as_list(values: Any) -> list[Any]:
    """Return one value or several as a list; None is no value.

    >>> as_list(None), as_list("a"), as_list(("a", "b"))
    ([], ['a'], ['a', 'b'])
    """
    if values is None:
        return []
    return list(values) if isinstance(values, list | tuple) else [values]


def _explain_reward(entry: Any) -> str:
    if isinstance(entry, str):
        return (
            f"reward_funcs has {format_value(entry)}: a reward model of a hub is not loaded here. "
            "Write a function that calls it, or name one: 'my_rewards.py:score'."
        )
    if hasattr(entry, "forward"):
        return (
            f"reward_funcs has a {type(entry).__name__}: a reward model is not called here. Write "
            "a function reward(prompts, completions, **columns) that calls it."
        )
    return (
        f"reward_funcs has {format_value(entry)}: it must be a function, "
        "'my_rewards.py:function', or a list of these."
    )
