"""examples/first_steps.ipynb runs from top to bottom and shows what its saved outputs show."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from notebook_cells import code_cells

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL"),
    pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib"),
]
HEALTHY = "klinic | 16 steps examined: no cause was found. Run: runs/healthy\n"
SICK = "klinic | 16 steps examined: stale-sampler. Run: runs/sick\n"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, warm_starts):
    folder = tmp_path_factory.mktemp("clone") / "examples"
    folder.mkdir()
    (folder.parent / "recipes").symlink_to(ROOT / "recipes")
    for name in (NOTEBOOK.name, "sick_trl.py"):
        (folder / name).write_text((ROOT / "examples" / name).read_text())
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("notebook_cells.py"), NOTEBOOK.name],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
        env=os.environ | {"KLINIC_CACHE": str(warm_starts), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "report.html").stat().st_size > 100_000
    return json.loads(done.stdout)


def test_the_bug_is_named_and_the_healthy_run_is_not_accused(outputs):
    text = "".join(outputs)
    assert HEALTHY in text
    assert SICK in text
    assert text.count("Cause: stale-sampler, first seen in step 2\n") == 1
    assert "runs/healthy: No fault found: " in text


def test_the_saved_outputs_say_the_same(outputs):
    notebook = json.loads(NOTEBOOK.read_text())
    saved = [
        "".join(cell["outputs"][0]["text"]) for cell in code_cells(notebook) if cell["outputs"]
    ]
    text = "".join(saved)
    assert HEALTHY in text
    assert SICK in text
    assert [cell["execution_count"] for cell in code_cells(notebook)] == [
        *range(1, len(outputs) + 1)
    ]
