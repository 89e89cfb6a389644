"""Saves a model that was passed as an object, so that a run can start from it again.

The object itself is left as it is: the run trains the saved copy, in the folder `start`. A model
with an adapter becomes an adapter folder, with its base in `base`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klinic.errors import ConfigError, first_line
from klinic.evidence.files import json_bytes
from klinic.evidence.writing import make_fresh_folder, remove_tree, write_durably
from klinic.model.adapter_files import BASE_FILE, CONFIG_FILE, check_adapter_files
from klinic.model.adapters import ADAPTER_NAME_PARTS, TRAINED_ADAPTER, has_adapter
from klinic.model.loading import hide_progress_bars

BASE_FOLDER = "base"
WRAPPERS = (".base_layer.", ".original_module.")  # around the layers that an adapter covers
DERIVED_STARTS = ("pissa", "olora", "corda", "eva", "loftq")
"""Starts of an adapter that change the base, and would change it again on loading."""


def save_given_model(model: Any, tokenizer: Any, start: Path) -> None:
    """Write a model in memory and its tokenizer to a folder that does not exist yet."""
    if start.exists():
        return
    tokenizer = _load_tokenizer(model) if tokenizer is None else tokenizer
    draft = start.with_name(f"{start.name}.unfinished")
    remove_tree(draft)
    make_fresh_folder(draft)
    with hide_progress_bars():
        if has_adapter(model):
            _save_adapted(model, draft, start)
        else:
            model.save_pretrained(draft, state_dict=fp32_state(model.state_dict()))
        tokenizer.save_pretrained(draft)
    if has_adapter(model):
        check_adapter_files(draft)
    draft.rename(start)


def fp32_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights in float32 on the CPU; tied weights stay one tensor."""
    converted: dict[tuple[int, torch.Size], Tensor] = {}
    result = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in converted:
            converted[key] = (
                tensor.detach().to("cpu", torch.float32) if tensor.is_floating_point() else tensor
            )
        result[name] = converted[key]
    return result


def base_state(model: Any) -> dict[str, Tensor]:
    """Return the weights under an adapter, by the names that they have without it."""
    state = {}
    for name, tensor in model.get_base_model().state_dict().items():
        if any(part in name for part in ADAPTER_NAME_PARTS):
            continue
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, ".")  # noqa: PLW2901 - a name with both is unwrapped twice
        state[name] = tensor
    return fp32_state(state)


def _save_adapted(model: Any, draft: Path, start: Path) -> None:
    """Write an adapter and its base; the adapter's config names the base's final place."""
    model.get_base_model().save_pretrained(draft / BASE_FOLDER, state_dict=base_state(model))
    model.save_pretrained(draft, selected_adapters=[TRAINED_ADAPTER], save_embedding_layers=False)
    config = json.loads((draft / CONFIG_FILE).read_text())
    config["base_model_name_or_path"] = str(start.absolute() / BASE_FOLDER)
    write_durably(draft / CONFIG_FILE, json_bytes(config))
    write_durably(draft / BASE_FILE, json_bytes({"folder": BASE_FOLDER}))


def _load_tokenizer(model: Any) -> Any:
    """Return the tokenizer of the folder or hub id that a model was loaded from."""
    from transformers import AutoTokenizer

    name = model.name_or_path
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"processing_class is missing, and {name}, from which the model was loaded, has no "
            f"tokenizer ({first_line(error)}). Pass processing_class=tokenizer."
        ) from error


def given_model_problems(model: Any, tokenizer: Any) -> list[str]:
    """Return why a model in memory cannot be saved as it is used, if so."""
    problems = []
    if tokenizer is None and not getattr(model, "name_or_path", ""):
        problems.append(
            "processing_class is missing: the model was not loaded from a folder or a hub id that "
            "has its tokenizer. Pass processing_class=tokenizer."
        )
    if getattr(model, "is_quantized", False) or hasattr(model, "hf_quantizer"):
        problems.append(
            "model is quantized: learner and sampler would have other log-probs. Load it without "
            "quantization; bf16=True with peft_config stores the frozen base in bf16."
        )
    if any(p.is_meta for p in model.parameters()):
        problems.append(
            "model has weights that are not in memory (device_map offloads them). Load it without "
            "device_map, or pass its folder or hub id."
        )
    return problems + (_adapter_problems(model) if has_adapter(model) else [])


def _adapter_problems(model: Any) -> list[str]:
    names = list(model.peft_config)
    if names != [TRAINED_ADAPTER]:
        return [
            f"model has the adapters {', '.join(names)}: klinic trains one, named default. Pass "
            "get_peft_model(model, peft_config)."
        ]
    start = str(getattr(model.peft_config[TRAINED_ADAPTER], "init_lora_weights", True))
    if start.startswith(DERIVED_STARTS):
        return [
            f"init_lora_weights is {start!r}: it changes the base, and would again when the run "
            "resumes. Use init_lora_weights=True."
        ]
    return []
