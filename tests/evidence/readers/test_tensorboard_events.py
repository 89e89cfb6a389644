"""Event files, made by hand and by TensorBoard's own writer."""

import math

import pytest
from foreign_logs import event, healthy, record, trl_entries, write_events

from klinic.errors import EvidenceError
from klinic.evidence.readers import tensorboard
from klinic.evidence.readers.find import read_log

NAME = "events.out.tfevents.1.host.1.0"


@pytest.mark.parametrize("tensors", [False, True])
def test_scalars_of_both_forms_are_read(tmp_path, tensors):
    entries = trl_entries(healthy(30))
    log = read_log(write_events(tmp_path / NAME, entries, tensors=tensors))
    assert log.trainer.name == "TRL"
    assert log.steps == tuple(range(1, 31))
    assert log.column("reward") == pytest.approx([entry["reward"] for entry in entries], rel=1e-6)
    assert log.written_as["reward"] == "train/reward"


def test_the_files_of_a_resumed_run_are_one_log(tmp_path):
    entries = trl_entries(healthy(30))
    write_events(tmp_path / "events.out.tfevents.1.h", entries[:20])
    write_events(tmp_path / "events.out.tfevents.2.h", entries[15:])
    assert read_log(tmp_path).steps == tuple(range(1, 31))


def test_a_record_that_is_still_being_written_is_left_out(tmp_path):
    path = write_events(tmp_path / NAME, trl_entries(healthy(5)))
    for cut in (1, 5, 30, 100):
        path.write_bytes(path.read_bytes()[:-cut])
        assert 1 <= len(read_log(path).steps) < 5


def test_every_flipped_byte_of_a_record_is_found(tmp_path):
    path = tmp_path / NAME
    data = record(event(1, {"train/reward": 0.5})) + record(event(2, {"train/reward": 0.5}))
    for place in range(len(data) // 2):
        broken = bytearray(data)
        broken[place] ^= 0x10
        path.write_bytes(broken)
        with pytest.raises(EvidenceError, match="record 1 has a wrong checksum"):
            read_log(path)


def test_a_record_with_its_checksum_that_is_no_event_is_refused(tmp_path):
    path = tmp_path / NAME
    for data in (b"\xff" * 20, b"\x2a\xff\xff\x01", b"\x2a\x04\x0a\x02\x0a\x09", b"\x0b"):
        path.write_bytes(record(data))
        with pytest.raises(EvidenceError, match="not an event"):
            read_log(path)


def test_pictures_are_skipped(tmp_path):
    picture = record(b"\x10\x01" + b"\x2a" + b"\x80\x80\x80\x01" + bytes(tensorboard.LARGEST))
    path = tmp_path / NAME
    path.write_bytes(picture + record(event(1, {"train/reward": 0.5})))
    assert read_log(path).column("reward") == (0.5,)


def test_what_tensorboard_itself_writes_is_read(tmp_path):
    writing = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto import event_pb2, summary_pb2

    writer = writing.EventFileWriter(str(tmp_path))
    for step in range(1, 4):
        value = summary_pb2.Summary.Value(tag="train/kl", simple_value=0.25 * step)
        other = summary_pb2.Summary.Value(tag="train/reward", simple_value=float("nan"))
        summary = summary_pb2.Summary(value=[value, other])
        writer.add_event(event_pb2.Event(step=step, summary=summary, wall_time=1.0))
    writer.close()
    log = read_log(tmp_path)
    assert log.steps == (1, 2, 3)
    assert log.column("kl") == (0.25, 0.5, 0.75)
    assert all(map(math.isnan, log.column("reward")))
