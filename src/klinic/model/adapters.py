"""Low-rank adapters on a model in memory: add, load, freeze, merge.

A policy trains one adapter (PEFT's `default`). The reference may be the same model with the adapter
disabled, or with a frozen copy of it active (`reference`). If that copy moves, another copy stays
at the start of the run (`start`). The base is never copied.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from klinic.errors import ConfigError
from klinic.model.adapter_files import WEIGHTS, check_files
from klinic.model.dropout import silence_dropout
from klinic.model.weights import digest

TRAINED = "default"
FROZEN = "reference"
START = "start"
LAYERS = "all-linear"
OWN = ("lora_", ".modules_to_save.")  # substrings of the names of adapter weights


def is_adapted(lm: Any) -> bool:
    """Whether a model in memory has an adapter."""
    return hasattr(lm, "peft_config")


def with_lora(lm: Any, *, rank: int, alpha: int | None, seed: int) -> Any:
    """Return the model with a new adapter on every linear layer except the head."""
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=0.0,
        target_modules=LAYERS,
        # GPT-2 stores its matrices transposed
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in lm.modules()),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _named(get_peft_model(lm, config), lm.name_or_path)


def with_adapter(lm: Any, folder: Path) -> Any:
    """Return the model with a trainable adapter loaded from a folder."""
    from peft import PeftModel

    check_files(folder)
    with torch.random.fork_rng(), _checked_here():
        torch.manual_seed(0)  # PiSSA may initialise from the base by random projections
        adapted = PeftModel.from_pretrained(lm, str(folder), is_trainable=True)
    _refuse_other_weights(adapted, load_file(folder / WEIGHTS), folder)
    silence_dropout(adapted)
    return _named(adapted, lm.name_or_path)


def restore(lm: Any, folder: Path) -> None:
    """Copy an adapter's saved weights into the trained adapter."""
    from peft import set_peft_model_state_dict

    saved = load_file(folder / WEIGHTS)
    _refuse_other_weights(lm, saved, folder)
    set_peft_model_state_dict(lm, saved, adapter_name=TRAINED)


def merge(lm: Any) -> Any:
    """Return the full model with the adapter merged into its base; every weight is trainable."""
    with _checked_here():
        whole = lm.merge_and_unload()
    config = whole.config.get_text_config()
    ends = [whole.get_input_embeddings().weight, whole.get_output_embeddings().weight]
    if config.tie_word_embeddings and ends[0] is not ends[1]:
        # the adapter has its own head or embedding: loading must not tie them again
        config.tie_word_embeddings = False
        whole.tie_weights()
    return whole.requires_grad_(True)  # PEFT froze the base


def starts_at_zero(lm: Any) -> bool:
    """Whether the adapter adds exactly 0: only low-rank matrices, and every `lora_B` is 0."""
    own = {name: p for name, p in lm.state_dict().items() if _is_own(name)}
    last = [p for name, p in own.items() if ".lora_B." in name]
    plain = all(".lora_A." in name or ".lora_B." in name for name in own)
    return plain and not any(bool(p.any()) for p in last)


def freeze_beside(lm: Any, name: str = FROZEN) -> None:
    """Add a frozen copy of the trained adapter to the model."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    config = copy.deepcopy(lm.peft_config[TRAINED])
    config.init_lora_weights = True  # other initialisations would change the base again
    config.inference_mode = True
    with torch.random.fork_rng(), _checked_here():
        lm.add_adapter(name, config)
    weights = get_peft_model_state_dict(lm, adapter_name=TRAINED, save_embedding_layers=False)
    set_peft_model_state_dict(lm, weights, adapter_name=name)
    lm.set_adapter(TRAINED)  # also makes it the trainable one
    silence_dropout(lm)


@contextmanager
def frozen_in_force(lm: Any, name: str = FROZEN) -> Iterator[None]:
    """Activate a frozen copy instead of the trained adapter within the context."""
    lm.set_adapter(name)
    try:
        yield
    finally:
        lm.set_adapter(TRAINED)


@contextmanager
def _checked_here() -> Iterator[None]:
    """Suppress PEFT warnings about cases that klinic checks itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Found missing adapter keys")
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings")
        yield


def policy_digest(lm: Any) -> str:
    """Return a hash of a policy's weights: base and trained adapter, without frozen copies."""
    return digest({n: p for n, p in lm.state_dict().items() if not _is_frozen(n)})


def frozen_state(lm: Any) -> dict[str, Tensor]:
    """Return base and frozen copy, keyed by the names of the trained adapter."""
    state = lm.state_dict()
    theirs = {name: state[_twin(name)] for name in state if _is_own(name) and not _is_frozen(name)}
    return {name: theirs.get(name, p) for name, p in state.items() if not _is_frozen(name)}


def frozen_twins(lm: Any) -> dict[str, Tensor]:
    """Return the frozen copy's tensors, keyed by the names of the trained ones."""
    parameters = dict(lm.named_parameters())
    return {name: parameters[_twin(name)] for name, p in parameters.items() if p.requires_grad}


def base_digest(lm: Any) -> str | None:
    """Return a hash of the base weights under an adapter; None without an adapter."""
    return digest(base_weights(lm)) if is_adapted(lm) else None


def base_weights(lm: Any) -> dict[str, Tensor]:
    """Return the base weights under an adapter, by name."""
    return {name: p for name, p in lm.state_dict().items() if not _is_own(name)}


def _is_own(name: str) -> bool:
    return any(part in name for part in OWN)


def _is_frozen(name: str) -> bool:
    return _is_own(name) and not {FROZEN, START}.isdisjoint(name.split("."))


def _twin(name: str) -> str:
    return ".".join(FROZEN if part == TRAINED else part for part in name.split("."))


def _named(lm: Any, base: str) -> Any:
    """Record the base's absolute path in the adapter config, so any working directory finds it."""
    found = Path(base)
    # a model built in memory has an empty name
    lm.peft_config[TRAINED].base_model_name_or_path = (
        str(found.resolve()) if base and found.is_dir() else base or None
    )
    return lm


def _refuse_other_weights(lm: Any, saved: dict[str, Tensor], folder: Path) -> None:
    """Refuse a file with missing weights, which would stay random, or with additional ones."""
    from peft import get_peft_model_state_dict

    needed = get_peft_model_state_dict(lm, adapter_name=TRAINED, save_embedding_layers=False)
    if missing := sorted(needed.keys() - saved.keys()):
        raise ConfigError(
            f"{folder / WEIGHTS} lacks {len(missing)} tensors, such as {missing[0]}: they would "
            "be initialised randomly. Save the adapter again."
        )
    if surplus := sorted(saved.keys() - needed.keys()):
        raise ConfigError(
            f"{folder / WEIGHTS} holds {len(surplus)} tensors that its config does not describe, "
            f"such as {surplus[0]}: klinic would train and save without them. Merge the adapter "
            "into its base with PEFT and use the merged model."
        )
