"""klinic trains language models with GRPO and a KL term that is proven right."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0.dev0"
__all__ = ["KL", "Recovery", "__version__", "attach", "train"]

# imported on first use: these need torch, the rest of klinic does not
LAZY = {
    "KL": "klinic.recipe.given",
    "Recovery": "klinic.recipe.given",
    "attach": "klinic.integrations.trl.attaching",
    "train": "klinic.loop.api",
}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module 'klinic' has no attribute {name!r}")
