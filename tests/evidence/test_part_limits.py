"""Parquet that is small on disk and huge in memory is refused before it is decoded."""

import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evidence.records import full_record
from klinic.errors import EvidenceError
from klinic.evidence import part_limits
from klinic.evidence.files import open_file, read_json
from klinic.evidence.readers.wire import WireError
from klinic.evidence.store import read_record, write_record
from klinic.evidence.thrift import read_struct

COMPACT = {"compression": "zstd", "write_statistics": False, "store_schema": False}


def seal(run, table=None, *, rows=None, parts=None, data=None, **how):
    """Write a step of one table, as a stranger would: the manifest agrees with what is there."""
    folder = run / "records" / "step=000001"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "part-00000.parquet"
    if table is not None:
        pq.write_table(table, part, **{**COMPACT, **how})
    if data is not None:
        part.write_bytes(data)
    entry = {
        "file": part.name,
        "rows": table.num_rows if rows is None else rows,
        "sha256": hashlib.sha256(part.read_bytes()).hexdigest(),
    }
    manifest = {"schema": 1, "step": 1, "parts": parts or [entry], "facts": {}}
    (folder / "complete.json").write_text(json.dumps(manifest))
    return part


def lists(values, num_rows=1):
    """Return as many rows of zeros that have so many values together."""
    offsets = np.linspace(0, values, num_rows + 1).astype(np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(values, np.int64)))


def table(**columns):
    return pa.table({"group": pa.array([0], pa.int64()), "token_ids": lists(1), **columns})


def refused(run, match):
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(EvidenceError, match=match):
        read_record(run, 1)
    allocated = pa.default_memory_pool().max_memory() - max(before, pa.total_allocated_bytes())
    assert allocated < 4 << 20


def number(value):
    """Return a whole number as Thrift's compact protocol writes it."""
    value, written = value << 1, []
    while value >= 128:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])


def padded(value, length):
    """Return the number in so many bytes, which is more than it needs."""
    written = bytearray(number(value))
    while len(written) < length:
        written[-1] |= 128
        written.append(0)
    return bytes(written)


def test_many_empty_rows_are_refused(tmp_path):
    num = part_limits.MOST_ROWS + 1
    rows = pa.table({"group": pa.array(np.zeros(num, np.int64)), "token_ids": lists(0, num)})
    assert seal(tmp_path, rows).stat().st_size < 10_000
    refused(tmp_path, r"part-00000\.parquet: has 131,073 rows, and a step at most 131,072")


@pytest.mark.parametrize("encoding", [{"use_dictionary": True}, {"use_dictionary": False}])
def test_many_tokens_in_few_bytes_are_refused(tmp_path, encoding):
    assert seal(tmp_path, table(token_ids=lists(2_000_000)), **encoding).stat().st_size < 10_000
    refused(tmp_path, "decodes to more than 64 times its size on disk")


def test_a_footer_that_claims_little_is_not_believed(tmp_path):
    """Arrow allocates what the header of a page says: 10 KB may stand for gigabytes."""
    part = seal(tmp_path, table(token_ids=lists(2_000_000)), use_dictionary=False)
    group = pq.ParquetFile(part).metadata.row_group(0)
    column = group.column(1)
    claims = {column.total_uncompressed_size: 10, column.num_values: 2, group.total_byte_size: 10}
    data = part.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:]
    for real, claimed in claims.items():
        footer = footer.replace(number(real), padded(claimed, len(number(real))))
    seal(tmp_path, rows=1, data=data[:start] + footer)
    assert pq.ParquetFile(part).metadata.row_group(0).column(1).total_uncompressed_size == 10
    refused(tmp_path, "decodes to more than 64 times its size on disk")


@pytest.mark.parametrize("how", [{"use_dictionary": False}, {"use_dictionary": True}])
def test_one_long_text_is_refused(tmp_path, how):
    seal(tmp_path, table(finish_reason=pa.array(["A" * (16 << 20)])), **how)
    refused(tmp_path, "decodes to more than 64 times")


@pytest.mark.parametrize(
    "how",
    [{"use_dictionary": True}, {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}],
)
def test_a_text_that_every_row_repeats_is_refused(tmp_path, how):
    num = 1000
    rows = {"group": pa.array(np.zeros(num, np.int64)), "token_ids": lists(num, num)}
    encoding = how.pop("column_encoding", None)
    if encoding is not None:
        how["column_encoding"] = {"finish_reason": encoding}
    long = pa.array(["A" * 100_000] * num)
    seal(tmp_path, pa.table({**rows, "finish_reason": long}), **how)
    refused(tmp_path, "decodes to more than 64 times")


def test_a_column_that_nobody_reads_costs_nothing(tmp_path):
    unknown = pa.array(["A" * (16 << 20)])
    seal(tmp_path, table(loss_mask=pa.array([[True]]), notes=unknown))
    before = pa.default_memory_pool().max_memory()
    assert read_record(tmp_path, 1).num_rows == 1
    assert pa.default_memory_pool().max_memory() - before < 4 << 20


def test_bytes_that_are_no_text_are_refused(tmp_path):
    raw = pa.array([b"\xff\xfe"])
    text = pa.StringArray.from_buffers(1, raw.buffers()[1], raw.buffers()[2])
    seal(tmp_path, table(loss_mask=pa.array([[True]]), finish_reason=text))
    with pytest.raises(EvidenceError, match="column `finish_reason` is not text"):
        read_record(tmp_path, 1)


def test_a_long_reason_to_end_is_cut(tmp_path):
    seal(tmp_path, table(loss_mask=pa.array([[True]]), finish_reason=pa.array(["A" * 500])))
    assert read_record(tmp_path, 1).finish_reason.tolist() == ["A" * 64]


def test_a_real_step_is_far_from_the_limit(tmp_path):
    write_record(tmp_path, full_record())
    read_record(tmp_path, 1)
    folder = tmp_path / "records" / "step=000001"
    data = (folder / "part-00000.parquet").read_bytes()
    parquet = pq.ParquetFile(pa.BufferReader(data))
    budget = part_limits.MemoryBudget(folder, ["part-00000.parquet"])
    before = budget._left
    budget.charge_columns(parquet, data, rows=full_record().num_rows, is_read=lambda _: True)
    assert before - budget._left < 10 * len(data)


def test_a_manifest_of_too_many_parts_is_refused(tmp_path):
    many = [{"file": f"part-{i:05d}.parquet", "rows": 1, "sha256": ""} for i in range(20_000)]
    seal(tmp_path, table(), parts=many)
    refused(tmp_path, r"complete\.json: `parts` lists 20,000 files, and a step has at most 16,384")


@pytest.mark.parametrize("link", [None, os.link, os.symlink])
def test_one_file_is_not_read_under_two_names(tmp_path, link):
    part = seal(tmp_path, table(loss_mask=pa.array([[True]])))
    entry = json.loads((part.parent / "complete.json").read_text())["parts"][0]
    other = {**entry, "file": entry["file"] if link is None else "part-00001.parquet"}
    if link is not None:
        link(part, part.parent / other["file"])
    seal(tmp_path, rows=1, parts=[entry, other])
    refused(tmp_path, r"names part-0000.\.parquet twice")


@pytest.mark.skipif(sys.platform != "linux", reason="makes holes")
@pytest.mark.parametrize("size", [1 << 20, 300 << 30])
def test_a_hole_that_ends_as_parquet_does_is_refused(tmp_path, size):
    part = seal(tmp_path, table())
    with part.open("r+b") as file:
        file.truncate(size)
        file.seek(size)
        file.write(b"PAR1")
    refused(tmp_path, "has a hole at byte|the parts have 307,200 MB")


@pytest.mark.skipif(sys.platform != "linux", reason="has /proc")
def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "f")
    regular = Path(__file__).stat()
    monkeypatch.setattr(type(tmp_path), "stat", lambda *_, **__: regular)
    with pytest.raises(EvidenceError, match="is not a regular file"):
        open_file(tmp_path / "f")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"a": "' + b"x" * (9 << 20) + b'"}', "is larger than 8 MB"),
        (b"[" + b"[]," * 300_000 + b"[]]", "more than 262,144 lists and objects"),
    ],
)
def test_json_that_would_take_far_more_memory_is_refused(tmp_path, content, reason):
    (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(EvidenceError, match=reason):
        read_json(tmp_path / "f.json")


def test_lists_in_lists_are_no_deep_recursion():
    with pytest.raises(WireError, match="a list nested too deep"):
        read_struct(b"\x19" * 3000, 0)
