"""Which tests can run here: without torch, only those of the parts that never need it."""

from importlib.util import find_spec

import pytest

HAS_TORCH = find_spec("torch") is not None
NEED_TORCH = ("verify", "model", "integrations")

collect_ignore = []
if not HAS_TORCH:
    collect_ignore += [f"src/klinic/{part}" for part in NEED_TORCH]
    collect_ignore += [f"tests/{part}" for part in NEED_TORCH]
    collect_ignore += ["src/klinic/cli/verify_tables.py", "README.md", "docs"]
else:
    import torch

    torch.set_num_threads(1)  # pytest-xdist uses the other cores


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_TORCH:
        return
    without = [item for item in items if "torch" not in item.keywords]
    config.hook.pytest_deselected(items=[item for item in items if "torch" in item.keywords])
    items[:] = without
