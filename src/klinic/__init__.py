"""klinic trains language models with GRPO and a KL term that is proven right.

The public API is `__all__`, typed in `__init__.pyi`; every other module but `klinic.rewards` is
private and may change without notice.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0.dev0"
__all__ = [
    "KL",
    "Recorder",
    "Recovery",
    "Result",
    "TorchProcesses",
    "__version__",
    "attach",
    "train",
]

# imported on demand: most need torch, which the rest of klinic does without
LAZY = {
    "KL": "klinic.recipe.python_sections",
    "Recorder": "klinic.doctor.recorder",
    "Recovery": "klinic.recipe.python_sections",
    "Result": "klinic.training.result",
    "TorchProcesses": "klinic.integrations.torch_processes",
    "attach": "klinic.integrations.trl.attach",
    "train": "klinic.training.api",
}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module 'klinic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
