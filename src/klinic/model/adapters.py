"""Low-rank adapters on a model in memory: put on, loaded, frozen beside, merged in.

A policy has one adapter that is trained (PEFT's `default`). The reference may be the same model
with it switched off, or with a frozen copy of it in force (`reference`); where that copy moves,
another one stays where the run started (`start`). The base is never copied.
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
OWN = ("lora_", ".modules_to_save.")  # in the names of weights that belong to an adapter


def is_adapted(lm: Any) -> bool:
    """Whether a model in memory carries an adapter."""
    return hasattr(lm, "peft_config")


def with_lora(lm: Any, *, rank: int, alpha: int | None, seed: int) -> Any:
    """Return the model with a fresh adapter on every linear layer but the head."""
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=0.0,
        target_modules=LAYERS,
        # GPT-2 keeps its matrices the other way round
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in lm.modules()),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _named(get_peft_model(lm, config), lm.name_or_path)


def with_adapter(lm: Any, folder: Path) -> Any:
    """Return the model with an adapter from a folder, ready to be trained further."""
    from peft import PeftModel

    check_files(folder)
    with torch.random.fork_rng(), _checked_here():
        torch.manual_seed(0)  # PiSSA may take its start out of the base by random projections
        adapted = PeftModel.from_pretrained(lm, str(folder), is_trainable=True)
    _refuse_other_weights(adapted, load_file(folder / WEIGHTS), folder)
    silence_dropout(adapted)
    return _named(adapted, lm.name_or_path)


def restore(lm: Any, folder: Path) -> None:
    """Copy an adapter's saved weights into the one that is trained."""
    from peft import set_peft_model_state_dict

    saved = load_file(folder / WEIGHTS)
    _refuse_other_weights(lm, saved, folder)
    set_peft_model_state_dict(lm, saved, adapter_name=TRAINED)


def merge(lm: Any) -> Any:
    """Return the whole model that base and adapter make together, every weight trainable."""
    with _checked_here():
        whole = lm.merge_and_unload()
    config = whole.config.get_text_config()
    ends = [whole.get_input_embeddings().weight, whole.get_output_embeddings().weight]
    if config.tie_word_embeddings and ends[0] is not ends[1]:
        # the adapter brought a head or an embedding of its own: loading must not tie them again
        config.tie_word_embeddings = False
        whole.tie_weights()
    return whole.requires_grad_(True)  # PEFT froze the base


def starts_at_zero(lm: Any) -> bool:
    """Whether the adapter adds exactly nothing: low-rank matrices alone, the last of each 0."""
    own = {name: p for name, p in lm.state_dict().items() if _is_own(name)}
    last = [p for name, p in own.items() if ".lora_B." in name]
    plain = all(".lora_A." in name or ".lora_B." in name for name in own)
    return plain and not any(bool(p.any()) for p in last)


def freeze_beside(lm: Any, name: str = FROZEN) -> None:
    """Put a frozen copy of the trained adapter beside it."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    config = copy.deepcopy(lm.peft_config[TRAINED])
    config.init_lora_weights = True  # others would take their start out of the base once more
    config.inference_mode = True
    with torch.random.fork_rng(), _checked_here():
        lm.add_adapter(name, config)
    weights = get_peft_model_state_dict(lm, adapter_name=TRAINED, save_embedding_layers=False)
    set_peft_model_state_dict(lm, weights, adapter_name=name)
    lm.set_adapter(TRAINED)  # also says which of them is trained
    silence_dropout(lm)


@contextmanager
def frozen_in_force(lm: Any, name: str = FROZEN) -> Iterator[None]:
    """Let a frozen copy take the trained adapter's place for a while."""
    lm.set_adapter(name)
    try:
        yield
    finally:
        lm.set_adapter(TRAINED)


@contextmanager
def _checked_here() -> Iterator[None]:
    """Keep PEFT from warning of what klinic refuses, or proves to be harmless, itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Found missing adapter keys")
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings")
        yield


def policy_digest(lm: Any) -> str:
    """Return a hash of a policy's weights: base and trained adapter, without a frozen copy."""
    return digest({n: p for n, p in lm.state_dict().items() if not _is_frozen(n)})


def frozen_state(lm: Any) -> dict[str, Tensor]:
    """Return the base and the frozen copy, under the names that the trained adapter has."""
    state = lm.state_dict()
    theirs = {name: state[_twin(name)] for name in state if _is_own(name) and not _is_frozen(name)}
    return {name: theirs.get(name, p) for name, p in state.items() if not _is_frozen(name)}


def frozen_twins(lm: Any) -> dict[str, Tensor]:
    """Return the tensors of the frozen copy by the names of the trained ones."""
    parameters = dict(lm.named_parameters())
    return {name: parameters[_twin(name)] for name, p in parameters.items() if p.requires_grad}


def base_digest(lm: Any) -> str | None:
    """Return a hash of the weights under an adapter; None where there is no adapter."""
    return digest(base_weights(lm)) if is_adapted(lm) else None


def base_weights(lm: Any) -> dict[str, Tensor]:
    """Return the weights under an adapter, by name."""
    return {name: p for name, p in lm.state_dict().items() if not _is_own(name)}


def _is_own(name: str) -> bool:
    return any(part in name for part in OWN)


def _is_frozen(name: str) -> bool:
    return _is_own(name) and not {FROZEN, START}.isdisjoint(name.split("."))


def _twin(name: str) -> str:
    return ".".join(FROZEN if part == TRAINED else part for part in name.split("."))


def _named(lm: Any, base: str) -> Any:
    """Let the adapter name its base so that it is found from any working directory."""
    found = Path(base)
    # an empty name is a model that was made in memory
    lm.peft_config[TRAINED].base_model_name_or_path = (
        str(found.resolve()) if base and found.is_dir() else base or None
    )
    return lm


def _refuse_other_weights(lm: Any, saved: dict[str, Tensor], folder: Path) -> None:
    """Refuse a file that lacks weights, which would stay random, or holds others."""
    from peft import get_peft_model_state_dict

    needed = get_peft_model_state_dict(lm, adapter_name=TRAINED, save_embedding_layers=False)
    if missing := sorted(needed.keys() - saved.keys()):
        raise ConfigError(
            f"{folder / WEIGHTS} lacks {len(missing)} tensors, such as {missing[0]}: they would "
            "start from random numbers. Save the adapter again."
        )
    if surplus := sorted(saved.keys() - needed.keys()):
        raise ConfigError(
            f"{folder / WEIGHTS} holds {len(surplus)} tensors that are not of its adapter, such as "
            f"{surplus[0]}: klinic would train and save without them. Merge the adapter into its "
            "base with PEFT and give the merged model."
        )
