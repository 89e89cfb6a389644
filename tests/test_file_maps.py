"""Every package with more than eight modules lists them in its docstring."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "klinic"
PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
ONE_PER_CAUSE = ("checks", "faults")
OF_TEACHERS = {"in_distillation"}


def docstring(package: Path) -> str:
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""


def modules(package: Path) -> set[str]:
    names = {path.stem for path in package.glob("*.py")}
    if package.name in ONE_PER_CAUSE:
        shared = {"base", "measures", "sampler_sync", "sampler_patches", "in_trl", "vllm_traps"}
        names &= shared | OF_TEACHERS
    return names - {"__init__", "__main__"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_file_map_is_complete(package):
    text = docstring(package)
    assert set(re.findall(r"(\w+)\.py\b", text)) <= modules(package)
    if len(list(package.glob("*.py"))) > 8:
        assert modules(package) <= set(re.findall(r"\w+", text))
