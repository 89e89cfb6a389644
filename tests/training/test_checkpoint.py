"""A checkpoint is whole or it is not used, and the message names file and reason."""

import random
import shutil

import pytest

from klinic.errors import CheckpointError
from klinic.training import checkpoint

DAMAGES = 50


@pytest.fixture
def run(tmp_path):
    for step in (1, 2):
        checkpoint.write_checkpoint(tmp_path, step, write_contents=fill(step), num_kept=2)
    return tmp_path


def fill(step):
    def put(folder):
        (folder / "model").mkdir()
        (folder / "model" / "model.safetensors").write_bytes(bytes([step]) * 4096)
        (folder / "model" / "config.json").write_text('{"a": 1}')
        (folder / "optimizer.safetensors").write_bytes(bytes([step, 7]) * 2048)
        return {"learner": {"num_updates": step}, "kl": None}

    return put


def test_the_newest_is_found_and_older_ones_go(run):
    checkpoint.write_checkpoint(run, 3, write_contents=fill(3), num_kept=2)
    found = checkpoint.newest_valid(run)
    assert (found.checkpoint.step, found.broken) == (3, [])
    assert found.checkpoint.state["learner"] == {"num_updates": 3}
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step=000002", "step=000003"]


def test_killed_while_one_is_removed_it_is_not_half_there(run, monkeypatch):
    def killed(folder, **_):
        if folder.exists():
            next(folder.rglob("state.json")).unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_checkpoint(run, 3, write_contents=fill(3), num_kept=2)
    assert checkpoint.checkpoint_steps(run) == [2, 3]
    monkeypatch.undo()
    checkpoint.remove_unfinished(run)
    assert len(list((run / "checkpoints").iterdir())) == 2


def test_one_more_may_stay(run):
    for step in (3, 4):
        checkpoint.write_checkpoint(
            run, step, write_contents=fill(step), num_kept=2, protected_step=1
        )
    assert checkpoint.checkpoint_steps(run) == [1, 3, 4]
    assert checkpoint.newest_valid(run, max_step=3).checkpoint.step == 3


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert checkpoint.newest_valid(tmp_path) == checkpoint.CheckpointSearch(
        checkpoint=None, broken=[]
    )


@pytest.mark.parametrize("kind", ["truncation", "bit flip"])
def test_every_damage_is_seen_named_and_survived(run, kind):
    newest = run / "checkpoints" / "step=000002"
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    stream = random.Random(kind)  # noqa: S311 - damage, not secrets
    for number in range(DAMAGES):
        path = files[number % len(files)]
        whole = path.read_bytes()
        path.write_bytes(
            truncated(whole, stream) if kind == "truncation" else flipped(whole, stream)
        )
        found = checkpoint.newest_valid(run)
        assert found.checkpoint is not None
        assert found.checkpoint.step == 1
        (message,) = found.broken
        assert str(path) in message or path.name == "manifest.json"
        assert "step=000002" in message
        path.write_bytes(whole)
    assert checkpoint.newest_valid(run).checkpoint.step == 2


def truncated(whole, stream):
    return whole[: stream.randrange(len(whole))]


def flipped(whole, stream):
    bit = stream.randrange(8 * len(whole))
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def test_a_file_that_is_gone_is_named(run):
    (run / "checkpoints" / "step=000002" / "optimizer.safetensors").unlink()
    (message,) = checkpoint.newest_valid(run).broken
    assert "optimizer.safetensors is missing" in message


def test_what_a_killed_save_left_is_not_a_checkpoint(run):
    draft = run / "checkpoints" / "step=000003.unfinished"
    shutil.copytree(run / "checkpoints" / "step=000002", draft)
    assert checkpoint.newest_valid(run).checkpoint.step == 2
    checkpoint.remove_unfinished(run)
    assert not draft.exists()


def test_a_checkpoint_under_another_name_is_not_believed(run):
    (run / "checkpoints" / "step=000002").rename(run / "checkpoints" / "step=000009")
    found = checkpoint.newest_valid(run)
    assert found.checkpoint.step == 1
    assert "step 2" in found.broken[0]


def test_all_broken_is_said_of_all(run):
    for folder in (run / "checkpoints").iterdir():
        (folder / "manifest.json").write_text("{}")
    found = checkpoint.newest_valid(run)
    assert found.checkpoint is None
    assert len(found.broken) == 2


def test_a_save_that_fails_leaves_the_last_one(run):
    def fails(folder):
        (folder / "half").write_bytes(b"x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.write_checkpoint(run, 3, write_contents=fails, num_kept=2)
    assert checkpoint.newest_valid(run).checkpoint.step == 2


def test_saving_a_step_again_replaces_it(run):
    checkpoint.write_checkpoint(run, 2, write_contents=fill(7), num_kept=2)
    assert checkpoint.newest_valid(run).checkpoint.state["learner"] == {"num_updates": 7}


def test_reading_a_step_that_is_not_there_is_refused(run):
    with pytest.raises(CheckpointError):
        checkpoint.read_checkpoint(run / "checkpoints" / "step=000004", 4)
