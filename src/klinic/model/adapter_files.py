"""Read, check and write an adapter folder.

The folder has PEFT's format (`adapter_config.json`, `adapter_model.safetensors`), so
`PeftModel.from_pretrained` loads an adapter that klinic wrote. A PEFT config can request far more
than low-rank matrices: other modules, other forwards, changed base weights. Settings that klinic is
not tested with are refused, because klinic would train or score a different model.
"""

import json
import os
from pathlib import Path
from typing import Any

from klinic.errors import ConfigError
from klinic.evidence.files import json_bytes
from klinic.evidence.writing import write_durably

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BASE = "base.json"
"""Path of the base relative to the adapter, so that a run folder can be moved with its start."""

UNDERSTOOD = frozenset(
    {
        *("peft_type", "task_type", "auto_mapping", "peft_version", "inference_mode"),
        *("base_model_name_or_path", "r", "lora_alpha", "lora_dropout"),
        *("use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("modules_to_save", "init_lora_weights"),
    }
)
STARTS = (True, False, "gaussian", "orthogonal", "olora", "pissa")
"""Initialisations of the low-rank matrices. The last two derive them from the base, and PEFT does
so again when it loads the adapter."""


def is_adapter(name: str) -> bool:
    """Whether a folder holds an adapter instead of a full model."""
    return (Path(name) / CONFIG).is_file()


def check_files(folder: Path) -> None:
    """Refuse an adapter that klinic cannot load faithfully, before loading any of it."""
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(
            f"{folder} has no {WEIGHTS}: klinic reads no other file of an adapter, since a pickle "
            "(adapter_model.bin) can run code. Load it with PEFT and `save_pretrained` it again."
        )
    config = _config(folder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(
            f"{folder / CONFIG}: peft_type is {kind!r}, but klinic trains only low-rank adapters "
            "(LORA). Merge it into its base with PEFT and use the merged model."
        )
    start = config.get("init_lora_weights", True)
    if start not in STARTS and not str(start).startswith("pissa_niter_"):
        _refuse(folder, "init_lora_weights", start)
    for key, value in config.items():
        if key not in UNDERSTOOD and value and value != _default(key):
            _refuse(folder, key, value)


def base_of(folder: Path) -> str:
    """Return the base model of an adapter: the one its config names, or where that was moved."""
    named = _config(folder).get("base_model_name_or_path")
    if not named or not isinstance(named, str):
        raise ConfigError(
            f"{folder / CONFIG} does not name its base model. Write its folder or hub id there as "
            "base_model_name_or_path."
        )
    beside = _beside(folder)
    base = str(beside) if beside is not None and not Path(named).is_dir() else named
    if is_adapter(base):
        raise ConfigError(
            f"{folder / CONFIG} names {base} as its base, which is itself an adapter. Merge that "
            "into a full model first: klinic export --merge."
        )
    return base


def save_adapter(lm: Any, folder: Path, *, adapter: str) -> None:
    """Write one adapter of a model for `PeftModel.from_pretrained`."""
    # the base's embeddings are not trained; otherwise PEFT looks them up on the hub
    lm.save_pretrained(folder, selected_adapters=[adapter], save_embedding_layers=False)
    base = lm.peft_config[adapter].base_model_name_or_path
    if base and Path(base).is_dir():
        there = os.path.relpath(Path(base).resolve(), folder.resolve())
        write_durably(folder / BASE, json_bytes({"folder": there}))


def _beside(folder: Path) -> Path | None:
    """Return the base at its recorded relative path; None if it is not there."""
    try:
        there = json.loads((folder / BASE).read_text())["folder"]
        found = (folder.resolve() / there).resolve()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.is_dir() else None


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / CONFIG} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / CONFIG} is not a JSON object.")
    return config


def _default(key: str) -> Any:
    from peft import LoraConfig

    return getattr(LoraConfig(), key, None)


def _refuse(folder: Path, key: str, value: Any) -> None:
    shown = str(value)[:40]
    raise ConfigError(
        f"{folder / CONFIG}: {key} is {shown}, which klinic does not support. Merge the adapter "
        "into its base with PEFT and use the merged model, with model.lora_rank for a new adapter "
        "on it."
    )
