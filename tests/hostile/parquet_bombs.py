"""Parquet files that are small on disk and large in memory, as the part of a step."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from healthy_run import PART, STEP, seal


def write_part(run, table, *, rows=None, **how):
    with (run / PART).open("wb") as file:  # Arrow takes no path that is not UTF-8
        pq.write_table(table, file, **{"compression": "zstd", **how})
    seal(run, rows=table.num_rows if rows is None else rows)


def zeros(values, num_rows=1, kind=np.int64):
    offsets = np.linspace(0, values, num_rows + 1).astype(np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(values, kind)))


def tokens(num, *, num_rows=1, **more):
    group = pa.array(np.arange(num_rows))
    mask = zeros(num, num_rows, np.bool_)
    return pa.table({"group": group, "token_ids": zeros(num, num_rows), "loss_mask": mask, **more})


def many_rows(run):
    write_part(run, tokens(0, num_rows=20_000_000))


def many_rows_within_the_limit(run):
    write_part(run, tokens(0, num_rows=131_072))


def many_groups_of_rows(run):
    write_part(run, tokens(20_000, num_rows=20_000), row_group_size=1)


def many_tokens(run):
    write_part(run, tokens(40_000_000), use_dictionary=False)


def tokens_within_the_limit(run):
    write_part(run, tokens(200_000, num_rows=100))


def many_steps_within_the_limit(run):
    """Repeat a step that decodes to as much as a small one may: a page shows 120 of them."""
    write_part(run, tokens(150_000, num_rows=10))
    for step in range(10, 70):
        folder = run / f"records/step={step:06d}"
        shutil.copytree(run / STEP, folder)
        manifest = json.loads((folder / "complete.json").read_text())
        (folder / "complete.json").write_text(json.dumps({**manifest, "step": step}))


def long_string(run):
    reason = pa.array(["A" * (1 << 30)])
    write_part(run, tokens(2, finish_reason=reason), use_dictionary=False)


def repeated_string(run):
    num = 20_000
    reason = pa.DictionaryArray.from_arrays(np.zeros(num, np.int32), ["A" * 1_000_000])
    write_part(run, tokens(num, num_rows=num, finish_reason=reason))


def long_string_of_no_meaning(run):
    write_part(run, tokens(2, notes=pa.array(["A" * (1 << 28)])), use_dictionary=False)


def many_columns(run):
    write_part(run, tokens(2, **{f"reward/{i}": pa.array([1.0]) for i in range(5000)}))


def lying_footer(run):
    """Let the footer claim a few values: Arrow believes the headers of the pages."""
    many_tokens(run)
    data = (run / PART).read_bytes()
    group = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(0)
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:]
    for place in (1, 2):
        column = group.column(place)
        for real in (column.total_uncompressed_size, column.num_values, group.total_byte_size):
            written = _varint(real)
            footer = footer.replace(written, _varint(1, len(written)))
    (run / PART).write_bytes(data[:start] + footer)
    seal(run, rows=1)


def _varint(value, length=0):
    value, written = value << 1, []
    while value >= 128 or len(written) + 1 < length:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])


def claimed_rows(run):
    seal(run, rows=10**9)


BOMBS = (
    *(many_rows, many_rows_within_the_limit, many_groups_of_rows, many_tokens),
    *(
        tokens_within_the_limit,
        many_steps_within_the_limit,
        long_string,
        repeated_string,
        long_string_of_no_meaning,
    ),
    *(many_columns, lying_footer, claimed_rows),
)
