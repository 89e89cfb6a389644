"""What cannot be continued is refused and stays: damaged, removed, moved, saved again."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import klinic
from fixture_run import copy_fixture, digest_of

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
FILES = (
    *("manifest.json", "state.json", "optimizer.safetensors", "model/model.safetensors"),
    *("model/config.json", "model/tokenizer.json", "model/tokenizer_config.json"),
    *("model/generation_config.json", "model/chat_template.jinja", "model/README.md"),
)


def truncate(path, stream):
    path.write_bytes(path.read_bytes()[: stream.randrange(path.stat().st_size)])


def flip(path, stream):
    data = bytearray(path.read_bytes())
    data[stream.randrange(len(data))] ^= 1 << stream.randrange(8)
    path.write_bytes(bytes(data))


def empty(path, _):
    path.write_bytes(b"")


def remove(path, _):
    path.unlink()


def zero(path, _):
    path.write_bytes(bytes(path.stat().st_size))


def extend(path, stream):
    path.write_bytes(path.read_bytes() + stream.randbytes(10))


def scramble(path, stream):
    path.write_bytes(stream.randbytes(path.stat().st_size))


def make_folder(path, _):
    path.unlink()
    path.mkdir()


DAMAGES = (truncate, flip, empty, remove, zero, extend, scramble, make_folder)
CASES = [(file, damage) for file in FILES for damage in DAMAGES]


def ids(value):
    return value if isinstance(value, str) else value.__name__


def damaged(tmp_path, file, damage, steps=(4,)):
    """Return a copy of the fixture's run with a file of some checkpoints damaged."""
    run = copy_fixture(tmp_path)
    stream = random.Random(f"{file} {damage.__name__}")  # noqa: S311 - damages, not secrets
    for step in steps:
        damage(run / "checkpoints" / f"step={step:06d}" / file, stream)
    return run


def resume(folder, *more):
    given = ("train", "recipe.yaml", "--resume", "loop.max_steps=6", *more)
    return klinic(*given, cwd=folder, timeout=200)


@pytest.mark.parametrize(("file", "damage"), CASES, ids=ids)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, file, damage):
    from klinic.training.resume import find_resume_point

    run = damaged(tmp_path, file, damage)
    before = digest_of(run)
    found = find_resume_point(run)
    assert found.checkpoint.step == 2
    (problem,) = found.broken
    assert str(run / "checkpoints" / "step=000004") in problem
    assert digest_of(run) == before


@pytest.mark.parametrize(("file", "damage"), CASES, ids=ids)
def test_damage_to_all_checkpoints_is_refused_and_nothing_changes(tmp_path, file, damage):
    from klinic.errors import CheckpointError
    from klinic.training.resume import find_resume_point

    run = damaged(tmp_path, file, damage, steps=(2, 4))
    before = digest_of(run)
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints can be read"):
        find_resume_point(run)
    assert digest_of(run) == before


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("state.json", scramble),
        *(pytest.param(f, d, marks=pytest.mark.slow) for f, d in CASES if f != "state.json"),
    ],
    ids=ids,
)
def test_a_run_goes_on_and_keeps_the_damaged_checkpoint(tmp_path, file, damage):
    run = damaged(tmp_path, file, damage)
    before = digest_of(run / "checkpoints" / "step=000004")
    done = resume(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Using the one before" in done.stdout
    assert "Resuming after step 2." in done.stdout
    assert digest_of(run / "checkpoints" / "step=000004.damaged") == before
    assert (run / "checkpoints" / "step=000006").is_dir()


def evidence(run):
    """Return the digest of a run without the lock."""
    (run / ".lock").unlink(missing_ok=True)
    return digest_of(run)


def test_a_run_without_a_readable_checkpoint_is_not_started_again(tmp_path):
    run = damaged(tmp_path, "state.json", scramble, steps=(2, 4))
    before = evidence(run)
    done = resume(tmp_path)
    assert done.returncode == 2
    assert "none of its 2 checkpoints can be read" in done.stderr
    assert "would replace the 4 steps that were recorded" in " ".join(done.stderr.split())
    assert "--start-over" in done.stderr
    assert evidence(run) == before


def test_a_run_whose_checkpoints_were_removed_is_not_started_again(tmp_path):
    run = copy_fixture(tmp_path)
    shutil.rmtree(run / "checkpoints")
    before = evidence(run)
    done = resume(tmp_path)
    assert done.returncode == 2
    assert "4 steps were recorded, and there is no checkpoint" in " ".join(done.stderr.split())
    assert evidence(run) == before


def test_starting_over_moves_the_old_run_aside(tmp_path):
    run = copy_fixture(tmp_path)
    before = digest_of(run)
    for number in (1, 2):
        done = klinic("train", "recipe.yaml", "--start-over", cwd=tmp_path, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"The previous run was moved to run.old-{number}." in done.stdout
    assert evidence(tmp_path / "run.old-1") == before
    assert (tmp_path / "run.old-2" / "checkpoints" / "step=000004").is_dir()
    assert (run / "checkpoints" / "step=000004").is_dir()


def test_starting_over_leaves_other_folders_alone(tmp_path):
    copy_fixture(tmp_path)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    given = ("train", "recipe.yaml", "--start-over", "output.dir=thesis")
    done = klinic(*given, cwd=tmp_path, timeout=100)
    assert done.returncode == 2
    assert "is not the folder of a run" in done.stderr
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "mine"
    both = klinic("train", "recipe.yaml", "--start-over", "--resume", cwd=tmp_path, timeout=100)
    assert both.returncode == 2


REWARD = """
import os, shutil
def short(completions, step=[0], **_):
    step[0] += 1
    if step[0] == {at}:
        {act}
    return [float(len(c)) for c in completions]
"""


def train_with(folder, act, at=3, start=klinic):
    """Train with a reward that does something to the machine in the middle of a run."""
    (folder / "rewards.py").write_text(REWARD.format(act=act, at=at))
    recipe = (folder / "recipe.yaml").read_text()
    recipe = recipe.replace("rewards: [graduated]", "rewards: ['rewards.py:short']")
    (folder / "recipe.yaml").write_text(recipe.replace("{dir: run,", "{dir: new, doctor: none,"))
    return start("train", "recipe.yaml", cwd=folder, timeout=200)


# klinic writes in the background: a folder that gains a file while it is deleted needs another pass
DELETE = "while os.path.isdir('new'): shutil.rmtree('new', ignore_errors=True)"


@pytest.mark.parametrize("act", ["os.rename('new', 'moved')", DELETE], ids=["moved", "deleted"])
def test_a_folder_that_is_moved_or_deleted_is_not_made_again(tmp_path, act):
    copy_fixture(tmp_path)
    done = train_with(tmp_path, act)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "was moved or deleted" in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_supervisor_does_not_start_a_run_again_that_lost_its_checkpoints(tmp_path):
    copy_fixture(tmp_path)
    act = (
        "[p.write_text('') for p in __import__('pathlib').Path('new').glob('*/*/state.json')]; "
        "os.kill(os.getpid(), 9)"
    )
    done = train_with(tmp_path, act, at=6, start=run_supervised)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "The run was killed by signal 9" in done.stderr
    assert "checkpoints can be read" in done.stderr
    assert '"policy_loss"' in (tmp_path / "new" / "metrics.jsonl").read_text()


def run_supervised(*arguments, cwd, timeout):
    alone = {**os.environ, "KLINIC_CACHE": str(cwd / "cache")}
    command = [str(Path(sys.executable).with_name("klinic")), *arguments]
    return subprocess.run(
        command, cwd=cwd, env=alone, timeout=timeout, capture_output=True, text=True, check=False
    )


def test_a_reward_that_changes_the_working_directory_does_not_move_the_run(tmp_path):
    copy_fixture(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    done = train_with(tmp_path, "os.chdir('elsewhere')", at=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "new" / "checkpoints" / "step=000004").is_dir()
    assert "Run: new\n" in done.stdout


@pytest.mark.parametrize("killed", ["before the new one has its name", "before the old one goes"])
def test_saving_a_step_again_never_leaves_it_without_a_checkpoint(tmp_path, monkeypatch, killed):
    from klinic.training import checkpoint

    def fill(value):
        def put(folder):
            (folder / "weights").write_text(value)
            return {}

        return put

    checkpoint.write_checkpoint(tmp_path, 0, write_contents=fill("old"), num_kept=1)
    rename = Path.rename

    def die(path, *_, **__):
        raise KeyboardInterrupt

    def rename_or_die(path, target):
        if path.name.endswith(".unfinished"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        if killed == "before the old one goes":
            patched.setattr(checkpoint, "remove_tree", lambda p: die(p) if p.exists() else None)
        else:
            patched.setattr(Path, "rename", rename_or_die)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.write_checkpoint(tmp_path, 0, write_contents=fill("new"), num_kept=1)
    checkpoint.restore_replaced(tmp_path)
    found = checkpoint.newest_valid(tmp_path).checkpoint
    expected = "old" if killed == "before the new one has its name" else "new"
    assert (found.folder / "weights").read_text() == expected
