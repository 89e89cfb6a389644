"""A dataset is read as it was written, or refused by file, row and column."""

import csv
import datetime
import errno
import os
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from dataset_files import DAMAGES, make_case, oracle, write
from pyarrow import parquet

from klinic.data.dataset import is_local_path, iterate_rows, read_rows, rows_from_python
from klinic.errors import DataError

SAMPLE, WHOLE = 240, 2_400
FULL = pytest.param(WHOLE, marks=[pytest.mark.slow, pytest.mark.timeout(600)])


def outcome(case, path):
    """Return what became of a case: `read`, `refused`, or what is wrong."""
    try:
        rows = [row for _, row in iterate_rows(str(path))]
    except DataError as error:
        return judge_refusal(case, str(path), str(error))
    if case.known and case.rows is None and "no rows" not in case.says:
        return f"read, and had to be refused: {rows!r}"
    truth = case.rows if case.known else oracle(case.suffix, case.data)
    if truth is None:
        truth = []
    equal = repr(comparable(rows)) == repr(comparable(truth))
    return "read" if equal else f"read wrong: {rows!r} for {truth!r}"


def comparable(rows):
    """Return rows with sorted nested fields: older versions of pyarrow sort them on writing."""
    return [{name: sorted_fields(value) for name, value in row.items()} for row in rows]


def sorted_fields(value):
    if isinstance(value, dict):
        return {name: sorted_fields(value[name]) for name in sorted(value)}
    return [sorted_fields(item) for item in value] if isinstance(value, list) else value


def judge_refusal(case, path, said):
    if path not in said:
        return f"the refusal does not name the file: {said}"
    if case.known and case.rows is not None:
        return f"refused, and had to be read: {said}"
    missing = [words for words in case.says if words not in said]
    return f"the refusal does not name {missing}: {said}" if missing else "refused"


@pytest.mark.parametrize("num", [SAMPLE, FULL])
def test_every_file_is_read_right_or_refused(num, tmp_path):
    limit = csv.field_size_limit()
    outcomes = Counter()
    wrong = []
    for seed in range(num):
        case = make_case(seed)
        path = write(case, tmp_path)
        try:
            result = outcome(case, path)
        except Exception as error:
            result = f"raised {type(error).__name__}: {error}"
        outcomes[result if result in {"read", "refused"} else "wrong"] += 1
        if result not in {"read", "refused"}:
            wrong.append(f"seed {seed} ({case.suffix}): {result[:300]}")
    assert not wrong, "\n".join(wrong[:20])
    assert outcomes["read"] > num * 0.45
    assert outcomes["refused"] > num * 0.25
    assert csv.field_size_limit() == limit


def test_every_kind_of_damage_is_in_the_sample():
    cases = [damage(Random(seed)) for damage in DAMAGES for seed in (1, 2)]  # noqa: S311
    assert all(case.rows is None and case.says for case in cases)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        (
            "rows.csv",
            b"prompt,answer\nx\n",
            r"row 1 \(line 2\) has no field for .*'answer'",
        ),
        ("rows.csv", b"prompt,answer\nx,1,2\n", r"row 1 \(line 2\) has 3 fields and the header 2"),
        ("rows.csv", b'prompt\n"a\nb"\n\nc,d\n', r"row 2 \(line 5\) has 2 fields"),
        ("rows.txt", b"hello", "klinic cannot read this file; it reads .jsonl"),
        ("rows.jsonl", b'\x1e{"prompt": "a"}\n', "line 1 is not JSON"),
        ("rows.json", b'{"prompt": "a"}', "is one JSON dict, not a list"),
        ("rows.jsonl", b'{"prompt": "a", "answer": "\\ud800"}', "`answer` is not valid Unicode"),
    ],
)
def test_a_refusal_says_where(name, data, says, tmp_path):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError, match=says):
        read_rows(str(path))


def test_a_path_that_is_no_file_of_rows_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "zeros.jsonl").symlink_to("/dev/zero")
    with (tmp_path / "hole.jsonl").open("wb") as file:
        file.truncate(1 << 36)
    (tmp_path / "hole.json").symlink_to("hole.jsonl")
    (tmp_path / "hole.csv").symlink_to("hole.jsonl")
    for path, says in {
        tmp_path / "pipe.jsonl": "is a pipe, a socket or a device",
        tmp_path / "zeros.jsonl": "is a pipe, a socket or a device",
        tmp_path / "folder.csv": "is a folder",
        tmp_path / "loop.jsonl": "cannot be read",
        tmp_path / "hole.jsonl": "zero byte",
        tmp_path / "hole.json": "zero byte",
        tmp_path / "hole.csv": "zero byte",
        "x" * 5000 + ".jsonl": "cannot be read",
        "x" * 5000: "cannot be read",
        "a\0b.jsonl": "cannot be read",
        "~nobody-has-this-name/rows.jsonl": "data.path is ~nobody-has-this-name",
        tmp_path / "none" / "rows.parquet": "no such file",
        "/dev/zero": "klinic cannot read this file",
    }.items():
        with pytest.raises(DataError, match=says):
            read_rows(str(path))


def test_a_path_that_cannot_be_looked_at_is_refused_before_a_run(tmp_path):
    for path in ("~nobody-has-this-name/rows", "x" * 5000, "a\0b"):
        with pytest.raises(DataError, match=r"data.path is|cannot be read"):
            is_local_path(path)
    assert is_local_path(str(tmp_path))
    assert is_local_path("missing.jsonl")
    assert not is_local_path("owner/name,config,train")


def test_a_file_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}')

    def deny(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", deny)  # tests may run as root, who reads everything
    with pytest.raises(DataError, match=r"rows.jsonl cannot be read: Permission denied"):
        read_rows(str(path))


def test_rows_beyond_a_batch_of_parquet_keep_their_numbers(tmp_path):
    path = tmp_path / "rows.parquet"
    when = pa.array([0] * 9_000 + [2**62]).cast(pa.timestamp("us"))
    parquet.write_table(pa.table({"prompt": ["a"] * 9_001, "when": when}), path)
    with pytest.raises(DataError, match="row 9001, column 'when'"):
        read_rows(str(path))
    parquet.write_table(pa.table({"prompt": [str(n) for n in range(9_001)]}), path)
    assert [row["prompt"] for row in read_rows(str(path))] == [str(n) for n in range(9_001)]


class Unshowable:
    def __repr__(self):
        raise RuntimeError("no")


def broken_rows():
    yield {"prompt": "a"}
    raise OSError("the cable is out")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"prompt": "a"}, {"prompt": 10**5000}], "row 2: `prompt` is a int that cannot be shown"),
        ([{"prompt": b"a"}], "row 1: `prompt` is b'a'"),
        ([{"prompt": "a", 3: "b"}], "row 1 has a column named 3"),
        ([{"prompt": "a", Unshowable(): "b"}], "a column named a Unshowable that cannot be shown"),
        ([{"prompt": "a", "x": "\udcff"}], "row 1: `x` is not valid Unicode"),
        ([{"prompt": "a", "\udcff": "x"}], "the name of column .* is not valid Unicode"),
        ([{"prompt": datetime.datetime(2020, 1, 1)}], "row 1: `prompt` is datetime"),
        ([{"prompt": np.float64(1)}], "row 1: `prompt` is np.float64"),
        ([Unshowable()], "row 1 is a Unshowable that cannot be shown, not a mapping"),
        ({"train": [{"prompt": "a"}]}, "train_dataset is a dict, not rows"),
        (7, "train_dataset is a int, not rows"),
        (broken_rows(), "train_dataset, row 2 cannot be read: OSError: the cable is out"),
    ],
)
def test_rows_from_python_are_refused_with_a_reason(rows, says):
    with pytest.raises(DataError, match=says):
        rows_from_python(rows, "train_dataset")


def test_rows_from_python_may_hold_any_value():
    rows = [{"prompt": np.str_("a"), "x": b"\xff", "y": np.int64(3), "z": datetime.date.max}]
    assert rows_from_python(iter(rows), "train_dataset") == rows
