"""Low-rank adapters on a model in memory: add, load, freeze, merge.

A policy trains one adapter (PEFT's `default`). The reference may be the same model with the adapter
disabled, or with a frozen copy of it active (`reference`). If that copy moves, another copy stays
at the start of the run (`start`). The base is never copied.
"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from klinic.errors import ConfigError
from klinic.model.adapter_files import WEIGHTS_FILE, check_adapter_files
from klinic.model.dropout import disable_dropout
from klinic.model.weights import digest, full_tensor, state_tensors

TRAINED_ADAPTER = "default"
FROZEN_ADAPTER = "reference"
START_ADAPTER = "start"
TARGET_MODULES = "all-linear"
ADAPTER_NAME_PARTS = ("lora_", ".modules_to_save.")  # substrings of the names of adapter weights


def has_adapter(lm: Any) -> bool:
    """Whether a model in memory has an adapter."""
    return hasattr(lm, "peft_config")


def add_lora_adapter(
    lm: Any,
    *,
    rank: int,
    alpha: int | None,
    seed: int,
    target_modules: Sequence[str] | None = None,
) -> Any:
    """Return the model with a new adapter on the named layers, or all linear ones but the head."""
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=0.0,
        target_modules=TARGET_MODULES if target_modules is None else list(target_modules),
        # GPT-2 stores its matrices transposed
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in lm.modules()),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), _explain_missing_layers(lm, target_modules):
        torch.manual_seed(seed)
        return _record_base_name(get_peft_model(lm, config), lm.name_or_path)


@contextmanager
def _explain_missing_layers(lm: Any, target_modules: Sequence[str] | None) -> Iterator[None]:
    """Replace PEFT's error about target modules by one that lists the layers of the model."""
    try:
        yield
    except ValueError as error:
        if target_modules is None:
            raise
        layers = (n for n, m in lm.named_modules() if isinstance(m, torch.nn.Linear))
        names = dict.fromkeys(name.rpartition(".")[2] for name in layers)
        raise ConfigError(
            f"model.lora_target_modules is {', '.join(target_modules)}: the model has no such "
            f"layer. Its linear layers are {', '.join(names)}."
        ) from error


def load_adapter(lm: Any, folder: Path) -> Any:
    """Return the model with a trainable adapter loaded from a folder."""
    from peft import PeftModel

    check_adapter_files(folder)
    with torch.random.fork_rng(devices=[]), _ignore_peft_warnings():
        torch.manual_seed(0)  # PiSSA may initialise from the base by random projections
        adapted = PeftModel.from_pretrained(lm, str(folder), is_trainable=True)
    _refuse_mismatched_weights(adapted, load_file(folder / WEIGHTS_FILE), folder)
    disable_dropout(adapted)
    return _record_base_name(adapted, lm.name_or_path)


def load_adapter_weights(lm: Any, folder: Path) -> None:
    """Copy an adapter's saved weights into the trained adapter."""
    from peft import set_peft_model_state_dict

    saved = load_file(folder / WEIGHTS_FILE)
    _refuse_mismatched_weights(lm, saved, folder)
    set_peft_model_state_dict(lm, saved, adapter_name=TRAINED_ADAPTER)


def merge_into_base(lm: Any) -> Any:
    """Return the full model with the adapter merged into its base; every weight is trainable."""
    with _ignore_peft_warnings():
        merged = lm.merge_and_unload()
    config = merged.config.get_text_config()
    embeddings = [merged.get_input_embeddings().weight, merged.get_output_embeddings().weight]
    if config.tie_word_embeddings and embeddings[0] is not embeddings[1]:
        # the adapter has its own head or embedding: loading must not tie them again
        config.tie_word_embeddings = False
        merged.tie_weights()
    return merged.requires_grad_(True)  # PEFT froze the base


def has_only_low_rank(lm: Any) -> bool:
    """Whether the adapter consists of pairs of low-rank matrices beside linear layers."""
    names = [name for name in lm.state_dict() if _is_adapter_weight(name)]
    return all(".lora_A." in name or ".lora_B." in name for name in names)


def starts_at_zero(lm: Any) -> bool:
    """Whether the adapter adds exactly 0: only low-rank matrices, and every `lora_B` is 0."""
    output_factors = [p for name, p in state_tensors(lm).items() if ".lora_B." in name]
    is_zero = [not bool(full_tensor(p).any()) for p in output_factors]
    return has_only_low_rank(lm) and all(is_zero)


def add_frozen_copy(lm: Any, name: str = FROZEN_ADAPTER) -> None:
    """Add a frozen copy of the trained adapter to the model."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    config = copy.deepcopy(lm.peft_config[TRAINED_ADAPTER])
    config.init_lora_weights = True  # other initialisations would change the base again
    config.inference_mode = True
    with torch.random.fork_rng(devices=[]), _ignore_peft_warnings():
        lm.add_adapter(name, config)
    weights = get_peft_model_state_dict(
        lm, adapter_name=TRAINED_ADAPTER, save_embedding_layers=False
    )
    set_peft_model_state_dict(lm, weights, adapter_name=name)
    _use_dtype_of_trained(lm, name)
    lm.set_adapter(TRAINED_ADAPTER)  # also makes it the trainable one
    disable_dropout(lm)


def _use_dtype_of_trained(lm: Any, name: str) -> None:
    """Give a copy of the adapter its dtype: PEFT before 0.19 takes that of the base, maybe bf16."""
    parameters = dict(lm.named_parameters())
    for trained_name, trained in parameters.items():
        if _is_adapter_weight(trained_name) and TRAINED_ADAPTER in trained_name.split("."):
            copied = parameters[_frozen_name(trained_name, name)]
            copied.data = copied.data.to(trained.dtype)


@contextmanager
def use_frozen_adapter(lm: Any, name: str = FROZEN_ADAPTER) -> Iterator[None]:
    """Activate a frozen copy instead of the trained adapter within the context."""
    lm.set_adapter(name)
    try:
        yield
    finally:
        lm.set_adapter(TRAINED_ADAPTER)


@contextmanager
def _ignore_peft_warnings() -> Iterator[None]:
    """Suppress PEFT warnings about cases that klinic checks itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Found missing adapter keys")
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings")
        yield


def policy_digest(lm: Any) -> str:
    """Return a hash of a policy's weights: base and trained adapter, without frozen copies."""
    return digest({n: p for n, p in state_tensors(lm).items() if not _is_frozen_weight(n)})


def frozen_state_dict(lm: Any) -> dict[str, Tensor]:
    """Return base and frozen copy, keyed by the names of the trained adapter."""
    state = lm.state_dict()
    frozen = {
        name: state[_frozen_name(name)]
        for name in state
        if _is_adapter_weight(name) and not _is_frozen_weight(name)
    }
    return {name: frozen.get(name, p) for name, p in state.items() if not _is_frozen_weight(name)}


def frozen_counterparts(lm: Any) -> dict[str, Tensor]:
    """Return the frozen copy's tensors, keyed by the names of the trained ones."""
    parameters = dict(lm.named_parameters())
    return {
        name: parameters[_frozen_name(name)] for name, p in parameters.items() if p.requires_grad
    }


def base_digest(lm: Any) -> str | None:
    """Return a hash of the base weights under an adapter; None without an adapter."""
    return digest(base_weights(lm)) if has_adapter(lm) else None


def base_weights(lm: Any) -> dict[str, Tensor]:
    """Return the base weights under an adapter, by name."""
    return {name: p for name, p in state_tensors(lm).items() if not _is_adapter_weight(name)}


def _is_adapter_weight(name: str) -> bool:
    return any(part in name for part in ADAPTER_NAME_PARTS)


def _is_frozen_weight(name: str) -> bool:
    return _is_adapter_weight(name) and not {FROZEN_ADAPTER, START_ADAPTER}.isdisjoint(
        name.split(".")
    )


def _frozen_name(name: str, adapter: str = FROZEN_ADAPTER) -> str:
    """Return the name of a trained weight's copy in a frozen adapter."""
    return ".".join(adapter if part == TRAINED_ADAPTER else part for part in name.split("."))


def _record_base_name(lm: Any, base: str) -> Any:
    """Record the base's absolute path in the adapter config, so any working directory finds it."""
    base_path = Path(base)
    # a model built in memory has an empty name
    lm.peft_config[TRAINED_ADAPTER].base_model_name_or_path = (
        str(base_path.resolve()) if base and base_path.is_dir() else base or None
    )
    return lm


def _refuse_mismatched_weights(lm: Any, saved: dict[str, Tensor], folder: Path) -> None:
    """Refuse a file with missing weights, which would stay random, or with additional ones."""
    from peft import get_peft_model_state_dict

    needed = get_peft_model_state_dict(
        lm, adapter_name=TRAINED_ADAPTER, save_embedding_layers=False
    )
    if missing := sorted(needed.keys() - saved.keys()):
        raise ConfigError(
            f"{folder / WEIGHTS_FILE} lacks {len(missing)} "
            f"tensors, such as {missing[0]}: they would "
            "be initialised randomly. Save the adapter again."
        )
    if surplus := sorted(saved.keys() - needed.keys()):
        raise ConfigError(
            f"{folder / WEIGHTS_FILE} holds {len(surplus)} "
            "tensors that its config does not describe, "
            f"such as {surplus[0]}: klinic would train and save without them. Merge the adapter "
            "into its base with PEFT and use the merged model."
        )
