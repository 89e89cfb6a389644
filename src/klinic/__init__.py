"""klinic trains language models with GRPO and a KL term that is proven right."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0.dev0"
__all__ = ["__version__", "train"]


def __getattr__(name: str) -> Any:
    # on demand: training needs torch, which the rest of klinic does without
    if name == "train":
        return import_module("klinic.loop.api").train
    raise AttributeError(f"module 'klinic' has no attribute {name!r}")
