"""The device of a one-process run: `auto` is the accelerator that torch finds, else the CPU."""

from typing import Any

import torch

from klinic.errors import ConfigError

NO_FLOAT64 = "mps"  # sampling and the comparisons of gradients need float64


def resolve_device(name: str) -> torch.device:
    """Return the device that a recipe's `model.device` names."""
    found = _find_accelerator()
    if name == "auto":
        lacks_float64 = found is not None and found.type == NO_FLOAT64
        return torch.device("cpu") if found is None or lacks_float64 else found
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if device.type == NO_FLOAT64:
        raise ConfigError(
            f"model.device is {name}: Apple's GPU has no float64, which sampling needs. Set "
            "model.device: cpu."
        )
    if found is None or found.type != device.type:
        available = "no accelerator" if found is None else f"only a device of type {found.type}"
        raise ConfigError(
            f"model.device is {name}: torch {torch.__version__} finds {available} here. Install a "
            "torch built for it, or set model.device: auto."
        )
    if (device.index or 0) >= (num := torch.accelerator.device_count()):
        raise ConfigError(
            f"model.device is {name}: there are {num} such devices here, counted from 0. Set "
            f"model.device: {device.type}."
        )
    return device


def move_model(lm: Any, device: torch.device) -> None:
    """Move a model in place; a head that shares its weight with the embedding keeps sharing it.

    Some backends replace parameters instead of changing them, which would separate the two.
    """
    is_tied = _has_tied_head(lm)
    lm.to(device)
    if is_tied and not _has_tied_head(lm):
        lm.get_output_embeddings().weight = lm.get_input_embeddings().weight


def _has_tied_head(lm: Any) -> bool:
    head = lm.get_output_embeddings()
    return head is not None and head.weight is lm.get_input_embeddings().weight


def release_cached_memory() -> None:
    """Return the GPU memory that this process has freed to the GPU, where an engine needs it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    """Return a device with the name of its hardware, if torch knows one."""
    if device.type not in ("cuda", "xpu"):
        return str(device)
    return f"{device} ({torch.get_device_module(device.type).get_device_name(device)})"


def unused_accelerator(device: torch.device) -> str | None:
    """Return the type of an accelerator of this machine that a run on `device` does not use."""
    found = _find_accelerator()
    return found.type if found is not None and found.type != device.type else None


def _find_accelerator() -> torch.device | None:
    is_available = torch.accelerator.is_available()
    return torch.accelerator.current_accelerator() if is_available else None
