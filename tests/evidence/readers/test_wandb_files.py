"""Offline runs of W&B, made by hand and by wandb itself."""

import contextlib
import math
import os
import time

import pytest
from foreign_logs import WandbFile, field, healthy, trl_entries, write_wandb

from klinic.errors import EvidenceError
from klinic.evidence.readers.find import read_log


@pytest.mark.parametrize("filler", [0, 3000, 32750, 32761, 32768, 100_000])
def test_records_are_read_across_blocks(tmp_path, filler):
    entries = trl_entries(healthy(30))
    log = read_log(write_wandb(tmp_path / "run-1.wandb", entries, filler=filler))
    assert log.trainer.name == "TRL"
    assert log.steps == tuple(range(1, 31))
    assert log.column("reward") == tuple(entry["reward"] for entry in entries)


def test_the_newest_run_below_wandb_is_read(tmp_path):
    for name, steps in (("offline-run-20260101_1-a", 5), ("offline-run-20260102_1-b", 7)):
        write_wandb(tmp_path / "wandb" / name / "run-x.wandb", trl_entries(healthy(steps)))
    assert len(read_log(tmp_path).steps) == 7


def test_a_nan_is_one_in_either_spelling(tmp_path):
    entries = trl_entries(healthy(3))
    entries[0]["kl"], entries[1]["kl"], entries[2]["kl"] = "NaN", float("nan"), "Infinity"
    kl = read_log(write_wandb(tmp_path / "run-1.wandb", entries)).column("kl")
    assert math.isnan(kl[0])
    assert math.isnan(kl[1])
    assert kl[2] == float("inf")


def test_every_flipped_byte_is_found(tmp_path):
    whole = write_wandb(tmp_path / "run-1.wandb", [{"step": 1, "kl": 0.5}]).read_bytes()
    for place in range(len(whole) - 12):  # the last record, of another kind, may look cut short
        broken = bytearray(whole)
        broken[place] ^= 0x10
        path = tmp_path / "broken.wandb"
        path.write_bytes(broken)
        with pytest.raises(EvidenceError, match=r"checksum|does not have the header|no entries"):
            read_log(path)


def test_a_run_that_goes_on_is_read_as_far_as_it_is(tmp_path):
    path = write_wandb(tmp_path / "run-1.wandb", trl_entries(healthy(20)), filler=10)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert 5 < len(read_log(path).steps) < 15


def test_records_that_are_no_protobuf_are_refused(tmp_path):
    file = WandbFile()
    file.add(b"\x08\x01" + field(2, b"\xff\xff\xff"))
    path = tmp_path / "run-1.wandb"
    path.write_bytes(bytes(file.data))
    with pytest.raises(EvidenceError, match="record 1 is not a W&B record"):
        read_log(path)


def settled(folder, steps):
    """Return the log once wandb's own process, which goes on after the run, has written it."""
    for _ in range(300):
        with contextlib.suppress(EvidenceError):
            log = read_log(folder)
            if len(log.steps) >= steps:
                return log
        time.sleep(0.1)
    return read_log(folder)


def test_what_wandb_itself_writes_is_read(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setitem(os.environ, "WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="made-up") as run:
        for step in range(1, 40):
            run.log({"train/kl": 0.25 * step, "train/reward": 1.0, "train/global_step": step})
        run.log({"train/kl": float("nan"), "train/reward": 1.0, "train/global_step": 40})
    log = settled(tmp_path, 40)
    assert log.format == "W&B offline run"
    assert log.steps == tuple(range(1, 41))
    assert log.column("kl")[:39] == tuple(0.25 * step for step in range(1, 40))
    assert math.isnan(log.column("kl")[39])
