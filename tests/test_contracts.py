"""Each import contract, broken once on purpose, is seen to be broken."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import klinic

pytest.importorskip("importlinter")

PACKAGE = Path(klinic.__file__).parent
ROOT = Path(__file__).parents[1]
BREAKS = {
    "Imports go down only": {"maths/kl.py": "import klinic.verify\n"},
    "Imports go down only (a stray package)": {"utils.py": "X = 1\n"},
    "Diagnosis needs no GPU stack": {"maths/kl.py": "import torch\n"},
    "A supervisor needs no GPU stack": {"training/run_folder.py": "import torch\n"},
    "Checks do not know one another": {
        "checks/__init__.py": "",
        "checks/one.py": "from klinic.checks import two\n",
        "checks/two.py": "X = 1\n",
    },
}


def lint(folder):
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("contract", BREAKS)
def test_a_broken_contract_is_seen(contract, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "klinic", ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in BREAKS[contract].items():
        file = tmp_path / "klinic" / path
        file.parent.mkdir(exist_ok=True)
        file.write_text((file.read_text() if file.exists() else "") + "\n" + text)
    result = lint(tmp_path)
    assert result.returncode == 1
    stray = "utils" in result.stdout and "stray" in contract
    assert stray or f"{contract} BROKEN" in result.stdout


def test_unbroken_they_hold(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "klinic", ignore=shutil.ignore_patterns("__pycache__"))
    assert lint(tmp_path).returncode == 0
