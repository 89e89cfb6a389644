"""Parts of many processes are merged to a few files, and a reader never finds half of a step."""

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from evidence.records import assert_same, full_record
from klinic.errors import EvidenceError
from klinic.evidence import part_merging, store
from klinic.evidence.part_merging import finish_merges, merge_parts
from klinic.evidence.record import select_rows

NUM_RANKS = 200


def write_ranks(run, num_ranks, step=1):
    """Write a step as ranks do: one part each, at the same time, then the manifest."""
    whole = full_record(step=step, lengths=tuple(np.arange(2 * num_ranks) % 5))
    rows = [select_rows(whole, [2 * rank, 2 * rank + 1]) for rank in range(num_ranks)]
    with ThreadPoolExecutor(max_workers=16) as pool:
        parts = list(pool.map(lambda r: store.write_part(run, rows[r], r), range(num_ranks)))
    store.complete_step(run, step, parts, whole.facts)
    return whole


def part_files(run, step=1):
    return sorted(path.name for path in store.step_folder(run, step).glob("part-*"))


def test_the_parts_of_200_writers_become_at_most_four_files_of_the_same_rows(tmp_path):
    whole = write_ranks(tmp_path, NUM_RANKS)
    assert len(part_files(tmp_path)) == NUM_RANKS
    before = store.read_record(tmp_path, 1)
    assert_same(before, whole)
    assert merge_parts(tmp_path, 1)
    assert 1 <= len(part_files(tmp_path)) <= part_merging.MAX_FILES
    assert_same(store.read_record(tmp_path, 1), before)
    assert [part.file for part in store.read_step_files(tmp_path, 1).parts] == part_files(tmp_path)
    assert not merge_parts(tmp_path, 1)


def test_a_large_step_becomes_four_files_of_about_equal_size(tmp_path, monkeypatch):
    monkeypatch.setattr(part_merging, "MERGED_BYTES", 1000)
    whole = write_ranks(tmp_path, 40)
    merge_parts(tmp_path, 1)
    rows = [part.rows for part in store.read_step_files(tmp_path, 1).parts]
    assert len(rows) == part_merging.MAX_FILES
    assert max(rows) <= 2 * min(rows)
    assert_same(store.read_record(tmp_path, 1), whole)


KILLED = """
import os, signal, sys
from pathlib import Path
from klinic.evidence import part_merging, store
left = int(sys.argv[2])
def killing(function):
    def call(*arguments):
        global left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return function(*arguments)
    return call
part_merging.MERGED_BYTES = 1000
store.write_durably = killing(store.write_durably)
store.write_atomically = killing(store.write_atomically)
part_merging.remove_tree = killing(part_merging.remove_tree)
part_merging.merge_parts(Path(sys.argv[1]), 1)
"""


# before the second merged file, before the manifest, before and amid the removal of old parts
@pytest.mark.parametrize("num_calls", [1, 4, 5, 9])
def test_killed_at_any_point_a_merge_leaves_the_step_readable(tmp_path, num_calls):
    whole = write_ranks(tmp_path, 12)
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(num_calls)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(part_files(tmp_path)) > part_merging.MAX_FILES
    assert_same(store.read_record(tmp_path, 1), whole)
    finish_merges(tmp_path, before=2)
    assert len(part_files(tmp_path)) <= part_merging.MAX_FILES
    assert_same(store.read_record(tmp_path, 1), whole)


def test_a_reader_that_began_before_the_merge_reads_the_merged_parts(tmp_path, monkeypatch):
    whole, original = write_ranks(tmp_path, 6), store.read_part
    monkeypatch.setattr(store, "read_part", lambda *a, **k: merge_first(tmp_path, original)(*a))
    assert_same(store.read_record(tmp_path, 1), whole)


def merge_first(run, original):
    store.read_part = original
    merge_parts(run, 1)
    return original


def test_a_part_that_cannot_be_read_keeps_the_whole_step_as_it_is(tmp_path):
    write_ranks(tmp_path, 6)
    path = store.step_folder(tmp_path, 1) / "part-00003.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    before = {p: p.read_bytes() for p in store.step_folder(tmp_path, 1).iterdir()}
    with pytest.raises(EvidenceError, match=r"part-00003\.parquet: is not the file"):
        merge_parts(tmp_path, 1)
    finish_merges(tmp_path, before=2)
    assert {p: p.read_bytes() for p in store.step_folder(tmp_path, 1).iterdir()} == before


def test_columns_of_another_program_are_kept(tmp_path):
    write_ranks(tmp_path, 6)
    folder = store.step_folder(tmp_path, 1)
    parts = []
    for path in sorted(folder.glob("part-*")):
        table = pq.read_table(path)
        parts.append(store.write_part_table(path, table.append_column("mine", [[1.5, 2.5]])))
    store.complete_step(tmp_path, 1, parts)
    merge_parts(tmp_path, 1)
    (merged,) = folder.glob("part-*")
    assert pq.read_table(merged).column("mine").to_pylist() == [1.5, 2.5] * 6


def test_a_step_of_ten_thousand_ranks_is_within_the_limits(tmp_path):
    one = store.write_part(tmp_path, full_record(lengths=(1,)), 0)
    folder = store.step_folder(tmp_path, 1)
    data = (folder / one.file).read_bytes()
    names = [store.part_name(rank) for rank in range(1000)]
    for name in names[1:]:
        (folder / name).write_bytes(data)
    parts = [store.Part(file=name, rows=1, sha256=one.sha256) for name in names]
    store.complete_step(tmp_path, 1, parts)
    # each of the 30 columns of a part has a page of its own
    assert store.read_record(tmp_path, 1).num_rows == 1000
    entries = [{"file": store.part_name(n), "rows": 1, "sha256": one.sha256} for n in range(10_000)]
    manifest = json.loads((folder / store.MANIFEST).read_text()) | {"parts": entries}
    manifest.pop("digest")
    (folder / store.MANIFEST).write_text(json.dumps(manifest))
    assert len(store.read_step_files(tmp_path, 1).parts) == 10_000


def test_a_record_of_many_processes_is_written_to_few_files(tmp_path):
    by_process = replace(full_record(lengths=(1,) * 50), process=np.arange(50) // 5)
    store.write_record(tmp_path, by_process)
    assert len(store.read_step_files(tmp_path, 1).parts) == store.MAX_PARTS
    assert_same(store.read_record(tmp_path, 1), by_process)
