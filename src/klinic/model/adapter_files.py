"""Read, check and write an adapter folder.

The folder has PEFT's format (`adapter_config.json`, `adapter_model.safetensors`), so
`PeftModel.from_pretrained` loads an adapter that klinic wrote. A PEFT config can request far more
than low-rank matrices: other modules, other forwards, changed base weights. Settings that klinic is
not tested with are refused, because klinic would train or score a different model.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from klinic.errors import ConfigError
from klinic.evidence.files import json_bytes
from klinic.evidence.writing import write_durably

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BASE_FILE = "base.json"
"""Path of the base relative to the adapter, so that a run folder can be moved with its start."""

SUPPORTED_KEYS = frozenset(
    {
        *("peft_type", "task_type", "auto_mapping", "peft_version", "inference_mode"),
        *("base_model_name_or_path", "r", "lora_alpha", "lora_dropout"),
        *("use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("modules_to_save", "init_lora_weights"),
    }
)
SUPPORTED_INITS = (True, False, "gaussian", "orthogonal", "olora", "pissa")
"""Initialisations of the low-rank matrices. The last two derive them from the base, and PEFT does
so again when it loads the adapter."""


def is_adapter(name: str) -> bool:
    """Whether a folder holds an adapter instead of a full model."""
    return (Path(name) / CONFIG_FILE).is_file()


def check_adapter_files(folder: Path) -> None:
    """Refuse an adapter that klinic cannot load faithfully, before loading any of it."""
    if not (folder / WEIGHTS_FILE).is_file():
        raise ConfigError(
            f"{folder} has no {WEIGHTS_FILE}: klinic reads no "
            "other file of an adapter, since a pickle "
            "(adapter_model.bin) can run code. Load it with PEFT and `save_pretrained` it again."
        )
    config = _read_config(folder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(
            f"{folder / CONFIG_FILE}: peft_type is {kind!r}, "
            "but klinic trains only low-rank adapters "
            "(LORA). Merge it into its base with PEFT and use the merged model."
        )
    init = config.get("init_lora_weights", True)
    if init not in SUPPORTED_INITS and not str(init).startswith("pissa_niter_"):
        _refuse_setting(folder, "init_lora_weights", init)
    for key, value in config.items():
        if key not in SUPPORTED_KEYS and value and value != _peft_default(key):
            _refuse_setting(folder, key, value)


def is_independent_of_base(folder: Path) -> bool:
    """Whether an adapter is loaded without reading or copying the weights of its base."""
    config = _read_config(folder)
    reads_base = config.get("init_lora_weights", True) not in (True, False, "gaussian")
    return not (reads_base or config.get("use_dora") or config.get("modules_to_save"))


def base_model_name(folder: Path) -> str:
    """Return the base model of an adapter: the one its config names, or where that was moved."""
    declared = _read_config(folder).get("base_model_name_or_path")
    if not declared or not isinstance(declared, str):
        raise ConfigError(
            f"{folder / CONFIG_FILE} does not name its base "
            "model. Write its folder or hub id there as "
            "base_model_name_or_path."
        )
    relocated = _relocated_base(folder)
    base = str(relocated) if relocated is not None and not Path(declared).is_dir() else declared
    if is_adapter(base):
        raise ConfigError(
            f"{folder / CONFIG_FILE} names {base} as its base, "
            "which is itself an adapter. Merge that "
            "into a full model first: klinic export --merge."
        )
    return base


def save_adapter(
    lm: Any, folder: Path, *, adapter: str, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write one adapter of a model for `PeftModel.from_pretrained`.

    `tensors` are its values by their names in the model, by default the model's own.
    """
    # the base's embeddings are not trained; otherwise PEFT looks them up on the hub
    lm.save_pretrained(
        folder,
        selected_adapters=[adapter],
        save_embedding_layers=False,
        state_dict=None if tensors is None else dict(tensors),
    )
    base = lm.peft_config[adapter].base_model_name_or_path
    if base and Path(base).is_dir():
        relative_base = os.path.relpath(Path(base).resolve(), folder.resolve())
        write_durably(folder / BASE_FILE, json_bytes({"folder": relative_base}))


def _relocated_base(folder: Path) -> Path | None:
    """Return the base at its recorded relative path; None if it is not there."""
    try:
        relative_base = json.loads((folder / BASE_FILE).read_text())["folder"]
        base_folder = (folder.resolve() / relative_base).resolve()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return base_folder if base_folder.is_dir() else None


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / CONFIG_FILE} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / CONFIG_FILE} is not a JSON object.")
    return config


def _peft_default(key: str) -> Any:
    from peft import LoraConfig

    return getattr(LoraConfig(), key, None)


def _refuse_setting(folder: Path, key: str, value: Any) -> None:
    shown = str(value)[:40]
    raise ConfigError(
        f"{folder / CONFIG_FILE}: {key} is {shown}, which "
        "klinic does not support. Merge the adapter "
        "into its base with PEFT and use the merged model, with model.lora_rank for a new adapter "
        "on it."
    )
