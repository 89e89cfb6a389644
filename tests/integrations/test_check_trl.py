"""`klinic check --trl`: a trainer of TRL on two steps, from the command line."""

import json
from pathlib import Path

import pytest

from commands import klinic
from integrations.trainers import save_start

pytest.importorskip("trl")
pytestmark = pytest.mark.timeout(400)
SCRIPT = """
import sys
from pathlib import Path

sys.path.insert(0, {tests!r})
from importlib import import_module

import_module("trl.import_utils").is_vllm_available = lambda *_, **__: False
from integrations.trainers import make_trainer


def sick():
    return make_trainer(Path("start"), Path("out"), max_steps=50)


def nothing():
    return None
"""


@pytest.fixture
def folder(tmp_path):
    # with dropout, which is to be found
    save_start(tmp_path / "start", attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1)
    (tmp_path / "train.py").write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    return tmp_path


def test_a_cause_is_named_and_nothing_is_left_behind(folder):
    told = klinic("check", "--trl", "train.py:sick", "--json", cwd=folder, timeout=300)
    assert told.returncode == 1, told.stderr
    found = json.loads(told.stdout)
    assert found["cause"] == "dropout-in-scoring"
    assert [part["name"] for part in found["parts"]][-1] == "update"
    assert not (folder / "runs").exists()
    assert not any((folder / "out").rglob("*"))  # TRL makes the folder, and nothing is saved


def test_what_is_no_trainer_is_refused_in_a_sentence(folder):
    told = klinic("check", "--trl", "train.py:nothing", cwd=folder, timeout=300)
    assert told.returncode == 2
    assert "received a NoneType" in told.stderr
    neither = klinic("check", cwd=folder, timeout=100)
    assert neither.returncode == 2
    assert "check needs either a recipe or --trl" in neither.stderr
