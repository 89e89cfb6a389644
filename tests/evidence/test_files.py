"""Files are there whole or not at all."""

import hashlib
import json

import numpy as np
import pytest

from klinic.errors import EvidenceError
from klinic.evidence import files
from klinic.evidence.files import Journal, read_json, sha256_of
from klinic.evidence.writing import write_atomically


def test_the_digest_is_that_of_all_bytes(tmp_path):
    data = bytes(range(256)) * 8192  # more than one chunk
    assert len(data) > files.BUFFER_BYTES
    (tmp_path / "f").write_bytes(data)
    assert sha256_of(tmp_path / "f") == hashlib.sha256(data).hexdigest()


def test_a_write_replaces_the_file_and_leaves_nothing_else(tmp_path):
    for data in (b"long before", b"after"):
        write_atomically(tmp_path / "f", data)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"f": b"after"}


def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing_else(tmp_path, monkeypatch):
    write_atomically(tmp_path / "f", b"before")

    def full_disk(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "f", b"after")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"f": b"before"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b'{"a": ', "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "holds a JSON list"),
    ],
)
def test_json_that_cannot_be_read_is_named(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(EvidenceError, match=rf"f\.json: .*{reason}"):
        read_json(tmp_path / "f.json")


def test_a_journal_gives_back_what_was_appended(tmp_path):
    journal = Journal(tmp_path / "j")
    assert list(journal.entries()) == []
    for step in range(3):
        journal.append({"step": step, "text": "é\n"})
    assert list(journal.entries()) == [{"step": s, "text": "é\n"} for s in range(3)]


def test_a_journal_writes_strict_json(tmp_path):
    Journal(tmp_path / "j").append(
        {"a": float("nan"), "b": [float("inf"), np.float32(0.5)], "c": {"d": np.array([1, 2])}}
    )
    line = (tmp_path / "j").read_text()

    def refuse(constant):
        raise AssertionError(constant)

    expected = {"a": None, "b": [None, 0.5], "c": {"d": [1, 2]}}
    assert json.loads(line, parse_constant=refuse) == expected


def entries_and_bytes(tmp_path):
    journal = Journal(tmp_path / "whole")
    for step in (1, 2):
        journal.append({"step": step})
    return (tmp_path / "whole").read_bytes()


def test_cut_anywhere_a_journal_keeps_its_whole_lines_and_goes_on(tmp_path):
    data = entries_and_bytes(tmp_path)
    line = len(data) // 2
    for cut in range(len(data) + 1):
        path = tmp_path / "cut"
        path.write_bytes(data[:cut])
        # the closing brace makes an entry, with or without the end of its line
        whole = [{"step": 1}] * (cut >= line - 1) + [{"step": 2}] * (cut >= 2 * line - 1)
        assert list(Journal(path).entries()) == whole
        Journal(path).append({"step": 9})
        assert list(Journal(path).entries()) == [*whole, {"step": 9}]


def test_a_broken_line_that_is_not_the_last_is_an_error(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b'{"step": 1}\n{"step"\n{"step": 3}\n')
    read = Journal(path).entries()
    assert next(read) == {"step": 1}
    with pytest.raises(EvidenceError, match="j, line 2: is not a JSON object"):
        next(read)


def test_a_rewind_keeps_what_it_is_told_and_drops_a_torn_tail(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    journal = Journal(path)
    journal.rewind(lambda entry: entry["step"] <= 2)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    journal.append({"step": 3})
    assert [e["step"] for e in journal.entries()] == [1, 2, 3]


def test_after_a_write_that_failed_the_journal_mends_itself(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "j")
    journal.append({"step": 1})

    class FullDisk:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def write(self, line):
            with (tmp_path / "j").open("r+b") as file:
                file.seek(0, 2)
                file.write(line[:4])
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "open_log", lambda _: FullDisk())
        with pytest.raises(OSError, match="No space left"):
            journal.append({"step": 2})
    journal.append({"step": 3})
    assert [e["step"] for e in journal.entries()] == [1, 3]


def test_lines_of_a_large_file_come_whole_and_holes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 1000)
    monkeypatch.setattr(files, "BUFFER_BYTES", 64)
    path = tmp_path / "log.jsonl"
    lines = [b"a" * 500 + b"\n", b"\n", b"b" * 63 + b"\n", b"c" * 700 + b"\n", b"torn"]
    path.write_bytes(b"".join(lines))
    assert list(files.numbered_lines(path)) == list(enumerate(lines, 1))
    for wrong in (b"d" * 1100 + b"\n", b"\0\n"):
        path.write_bytes(b"".join(lines[:4]) + wrong)
        with pytest.raises(EvidenceError, match="line 5: is longer"):
            list(files.numbered_lines(path))
