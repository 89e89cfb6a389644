"""The thread that writes records: bounded, honest about failure, safe to kill."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from evidence.records import assert_same, full_record
from klinic.evidence import store
from klinic.evidence.store import (
    MAX_QUEUED,
    RecordWriter,
    complete_steps,
    read_record,
    remove_records_after,
)

WRITE_FOREVER = """
import sys
from itertools import count
from pathlib import Path
from evidence.records import full_record
from klinic.evidence.store import RecordWriter

with RecordWriter(Path(sys.argv[1])) as writer:
    for step in count(1):
        writer.put(full_record(step=step, lengths=(2000, 0, 500)))
"""


@pytest.fixture
def disk(monkeypatch):
    """Return a disk that writes nothing before it is told to."""
    released, real = threading.Event(), store.write_record

    def wait_and_write(*args):
        assert released.wait(timeout=60)
        real(*args)

    monkeypatch.setattr(store, "write_record", wait_and_write)
    yield released
    released.set()


def test_records_are_written_in_the_background_and_close_waits_for_them(tmp_path, disk):
    with RecordWriter(tmp_path) as writer:
        writer.put(full_record(step=1))
        assert complete_steps(tmp_path) == []
        disk.set()
    assert_same(read_record(tmp_path, 1), full_record(step=1))


def test_training_waits_only_when_enough_records_wait(tmp_path, disk):
    returned = []
    with RecordWriter(tmp_path) as writer:

        def train():
            for step in range(1, MAX_QUEUED + 3):
                writer.put(full_record(step=step))
                returned.append(step)

        trainer = threading.Thread(target=train)
        trainer.start()
        trainer.join(timeout=1)
        waited, before = trainer.is_alive(), list(returned)
        disk.set()
        trainer.join(timeout=60)
    assert waited
    assert before == list(range(1, MAX_QUEUED + 2))  # one is being written, the others wait
    assert complete_steps(tmp_path) == returned == list(range(1, MAX_QUEUED + 3))


def test_records_can_be_read_while_the_run_goes_on(tmp_path):
    with RecordWriter(tmp_path) as writer:
        for step in range(1, 13):
            writer.put(full_record(step=step, seed=step))
            for seen in complete_steps(tmp_path):
                assert_same(read_record(tmp_path, seen), full_record(step=seen, seed=seen))
    assert complete_steps(tmp_path) == list(range(1, 13))


def in_the_way(run):
    (run / "records").write_text("a file where the folder should be")


def test_what_went_wrong_is_raised_by_close(tmp_path):
    in_the_way(tmp_path)
    writer = RecordWriter(tmp_path)
    writer.put(full_record())
    with pytest.raises(NotADirectoryError, match="records"):
        writer.close()


def test_what_went_wrong_is_raised_by_the_next_put(tmp_path):
    in_the_way(tmp_path)
    writer = RecordWriter(tmp_path)
    writer.put(full_record())
    with pytest.raises(NotADirectoryError, match="records"):  # noqa: PT012 - it may take a few
        for step in range(2, 1000):
            time.sleep(0.01)
            writer.put(full_record(step=step))
    assert complete_steps(tmp_path) == []


def test_killed_while_writing_a_run_has_only_whole_steps(tmp_path):
    command = [sys.executable, "-c", WRITE_FOREVER, str(tmp_path)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(store.__file__).parents[2])])
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}) as process:
        for enough in (5, 9):
            deadline = time.monotonic() + 60
            while len(complete_steps(tmp_path)) < enough:
                assert process.poll() is None
                assert time.monotonic() < deadline
        process.send_signal(signal.SIGKILL)
    found = complete_steps(tmp_path)
    assert found == list(range(1, len(found) + 1))
    for step in found:
        assert_same(read_record(tmp_path, step), full_record(step=step, lengths=(2000, 0, 500)))
    remove_records_after(tmp_path, 4)
    assert sorted(p.name for p in (tmp_path / "records").iterdir()) == [
        f"step={step:06d}" for step in (1, 2, 3, 4)
    ]
