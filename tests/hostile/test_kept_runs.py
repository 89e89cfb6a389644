"""A run folder of an earlier version is read, and one of a later version is left as it is."""

import hashlib
import json

import pytest

from commands import klinic
from fixture_run import copy_fixture, digest_of

NEWER = 99
LOOKING = [["diagnose", "run"], ["report", "run", "--terminal"], ["watch", "run"]]
LOADING = [
    ["eval", "run"],
    ["export", "run", "--to", "out"],
    ["check", "run/recipe.yaml"],
    ["train", "recipe.yaml", "--resume"],
    ["eval", "run/checkpoints/step=000004"],
]


def mark_run(run):
    rewrite(run / "run.json")


def mark_record(run):
    for manifest in (run / "records").glob("*/complete.json"):
        rewrite(manifest)


def mark_checkpoints(run):
    """Mark the newest as a later version would: its digests are right."""
    folder = run / "checkpoints" / "step=000004"
    rewrite(folder / "state.json")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["state.json"] = sha256(folder / "state.json")
    text = json.dumps(manifest["files"], sort_keys=True).encode()
    manifest["digest"] = hashlib.sha256(text).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def rewrite(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": NEWER}))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refuse(tmp_path, mark, command):
    mark(copy_fixture(tmp_path))
    before = digest_of(tmp_path)
    done = klinic(*command, cwd=tmp_path, timeout=100)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"schema {NEWER}" in done.stderr
    assert "Update klinic" in done.stderr
    assert digest_of(tmp_path) == before


@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
@pytest.mark.parametrize("mark", [mark_run, mark_record, mark_checkpoints])
def test_a_run_of_a_later_version_is_refused_and_not_changed(tmp_path, mark, command):
    refuse(tmp_path, mark, command)


@pytest.mark.torch
@pytest.mark.parametrize("command", LOADING, ids=" ".join)
@pytest.mark.parametrize("mark", [mark_run, mark_record, mark_checkpoints])
def test_a_run_of_a_later_version_is_not_loaded_either(tmp_path, mark, command):
    refuse(tmp_path, mark, command)


@pytest.mark.torch
def test_a_run_of_a_later_version_is_refused_before_its_rewards_are_imported(tmp_path):
    mark_checkpoints(copy_fixture(tmp_path))
    rewards = tmp_path / "rewards.py"
    rewards.write_text("from pathlib import Path\nPath('ran').touch()\ndef one(**_): return []\n")
    for recipe in (tmp_path / "recipe.yaml", tmp_path / "run" / "recipe.yaml"):
        recipe.write_text(recipe.read_text().replace("graduated", "rewards.py:one"))
    done = klinic("train", "recipe.yaml", "--resume", cwd=tmp_path, timeout=100)
    assert done.returncode == 2
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
def test_the_run_of_schema_1_is_read(tmp_path, command):
    copy_fixture(tmp_path)
    before = digest_of(tmp_path)
    done = klinic(*command, cwd=tmp_path, timeout=100)
    assert done.returncode in {0, 1}, done.stderr  # 1: the doctor names a cause
    assert done.stdout
    assert digest_of(tmp_path) == before


@pytest.mark.torch
def test_the_run_of_schema_1_is_resumed(tmp_path):
    run = copy_fixture(tmp_path)
    done = klinic("train", "recipe.yaml", "--resume", "loop.max_steps=6", cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Resuming after step 4." in done.stdout
    assert (run / "checkpoints" / "step=000006" / "manifest.json").is_file()
    assert len(list((run / "records").glob("step=*/complete.json"))) == 6
