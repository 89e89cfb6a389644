"""The same with the other versions of TRL that klinic says it works with.

    pip install --no-deps --target FOLDER/1.14 "trl==1.14.*"
    KLINIC_TRL=FOLDER pytest -m slow tests/integrations/test_other_trl.py

The folder `newest` holds the newest release of the index, as a canary. TRL 1.15.0 scores with
Triton kernels alone, so it needs a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAME = "(last_bit and True-True) or token_weights or beta_0 or no_trace"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["1.14", "1.15", "newest"])
def test_attaching_works_with(version):
    folder = Path(os.environ.get("KLINIC_TRL", "/nowhere"), version)
    if not folder.is_dir():
        pytest.skip(f"TRL {version} is not installed in {folder}")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    told = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "tests/integrations/test_attach.py",
            "-k",
            SAME,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout[-3000:]
