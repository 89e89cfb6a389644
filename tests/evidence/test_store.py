"""Records on disk: what is written comes back, and what is damaged is refused."""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from evidence.records import assert_same, full_record, records
from klinic.errors import EvidenceError
from klinic.evidence.schema_version import SCHEMA
from klinic.evidence.store import (
    complete_step,
    complete_steps,
    manifest_digest,
    read_record,
    remove_records_after,
    write_part,
    write_record,
)

MANIFEST = Path("records/step=000001/complete.json")
PART = Path("records/step=000001/part-00000.parquet")
ENTRY = {"file": PART.name, "rows": 3, "sha256": ""}


@pytest.fixture
def run(tmp_path):
    write_record(tmp_path, full_record())
    return tmp_path


def remake_manifest(run, **changes):
    manifest = json.loads((run / MANIFEST).read_text()) | changes
    manifest["digest"] = manifest_digest(manifest)
    (run / MANIFEST).write_text(json.dumps(manifest))


@given(records())
def test_any_record_comes_back(record):
    with tempfile.TemporaryDirectory() as run:
        write_record(Path(run), record)
        assert complete_steps(Path(run)) == [record.step]
        assert_same(read_record(Path(run), record.step), record)


def test_the_folder_is_as_documented(run):
    names = sorted(str(p.relative_to(run)) for p in run.rglob("*") if p.is_file())
    assert names == [str(MANIFEST), str(PART)]
    manifest = json.loads((run / MANIFEST).read_text())
    digest = hashlib.sha256((run / PART).read_bytes()).hexdigest()
    assert manifest["parts"] == [{"file": PART.name, "rows": 3, "sha256": digest}]
    assert manifest["schema"] == SCHEMA


def test_a_fact_that_is_no_number_stays_apart_from_one_that_was_not_recorded(tmp_path):
    facts = {"grad_norm": float("nan"), "loss": float("-inf"), "kl_coef": float("inf"), "a": None}
    write_record(tmp_path, replace(full_record(), facts=facts))
    found = read_record(tmp_path, 1).facts
    np.testing.assert_equal(dict(found), facts)


def test_cut_anywhere_a_file_is_refused(run):
    for path in (PART, MANIFEST):
        data = (run / path).read_bytes()
        for cut in range(0, len(data) - 1, 10):
            (run / path).write_bytes(data[:cut])
            with pytest.raises(EvidenceError, match=path.name):
                read_record(run, 1)
        (run / path).write_bytes(data)
    assert_same(read_record(run, 1), full_record())


def test_cut_anywhere_parquet_is_refused_even_if_the_manifest_agrees(run):
    data = (run / PART).read_bytes()
    for cut in range(0, len(data), 10):
        (run / PART).write_bytes(data[:cut])
        digest = hashlib.sha256(data[:cut]).hexdigest()
        remake_manifest(run, parts=[{"file": PART.name, "rows": 3, "sha256": digest}])
        with pytest.raises(EvidenceError, match=r"part-00000\.parquet: is not Parquet"):
            read_record(run, 1)


@pytest.mark.parametrize(("path", "every"), [(PART, 81), (MANIFEST, 1)])
def test_a_flipped_bit_is_refused(run, path, every):
    data = (run / path).read_bytes()
    for bit in range(0, 8 * len(data), every):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        (run / path).write_bytes(flipped)
        with pytest.raises(EvidenceError, match=path.name):
            read_record(run, 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": 3}, "has schema 3, but this klinic reads up to 2. Update klinic"),
        ({"schema": "1"}, "has schema 1, step 1; expected 1 to 2, 1"),
        ({"step": 2}, "has schema 2, step 2; expected 1 to 2, 1"),
        ({"colour": "red"}, "must have the keys"),
        ({"facts": [1]}, "`facts`"),
        ({"parts": []}, "`parts` must list"),
        ({"parts": 3}, "`parts` must list"),
        ({"parts": [{"file": PART.name}]}, "`parts` must list"),
        ({"parts": [{"file": PART.name, "rows": float("inf"), "sha256": ""}]}, "`parts` must list"),
        (
            {"parts": [{"file": f"../{PART.parent.name}/{PART.name}", "rows": 3, "sha256": ""}]},
            "in",
        ),
        (
            {"parts": [{"file": "part-9.parquet", "rows": 3, "sha256": ""}]},
            "The manifest requires",
        ),
    ],
)
def test_a_manifest_that_cannot_be_meant_is_refused(run, changes, reason):
    remake_manifest(run, **changes)
    with pytest.raises(EvidenceError, match=reason):
        read_record(run, 1)


def test_a_manifest_needs_no_digest_but_must_have_the_one_it_names(run):
    manifest = json.loads((run / MANIFEST).read_text())
    del manifest["digest"]
    (run / MANIFEST).write_text(json.dumps(manifest))
    assert_same(read_record(run, 1), full_record())
    (run / MANIFEST).write_text(json.dumps(manifest | {"digest": "0" * 64}))
    with pytest.raises(EvidenceError, match="does not match its `digest`"):
        read_record(run, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_no_thread_of_arrows_outlives_a_reading(run):
    """Python 3.11 ends such a thread when it asks for the GIL at exit, and C++ aborts on that."""
    counting = (
        "import os, sys; from pathlib import Path; from klinic.evidence.store import read_record\n"
        "threads = lambda: os.listdir('/proc/self/task')\n"
        "before = threads(); read_record(Path(sys.argv[1]), 1)\n"
        "assert threads() == before"
    )
    subprocess.run([sys.executable, "-c", counting, str(run)], check=True)


def test_rows_are_counted(run):
    digest = hashlib.sha256((run / PART).read_bytes()).hexdigest()
    remake_manifest(run, parts=[{"file": PART.name, "rows": 2, "sha256": digest}])
    with pytest.raises(EvidenceError, match=r"3 rows, which differs from its manifest \(2\)"):
        read_record(run, 1)


def test_a_step_without_its_manifest_does_not_count(run):
    part = write_part(run, full_record(step=2), rank=0)
    assert complete_steps(run) == [1]
    with pytest.raises(EvidenceError, match=r"step=000002/complete\.json: cannot be read"):
        read_record(run, 2)
    complete_step(run, 2, [part])
    assert complete_steps(run) == [1, 2]


def test_parts_of_several_ranks_are_one_step(tmp_path):
    halves = [full_record(lengths=(2, 1), seed=s) for s in (0, 1)]
    parts = [write_part(tmp_path, half, rank) for rank, half in enumerate(halves)]
    complete_step(tmp_path, 1, parts, {"kl_coef": 0.5})
    found = read_record(tmp_path, 1)
    assert found.row_offsets.tolist() == [0, 2, 3, 5, 6]
    assert found.facts == {"kl_coef": 0.5}
    expected = np.concatenate([half.logp for half in halves])
    np.testing.assert_array_equal(found.logp, expected)


def test_a_column_that_only_some_ranks_wrote_is_refused(tmp_path):
    parts = [
        write_part(tmp_path, full_record(), 0),
        write_part(tmp_path, replace(full_record(), entropy=None), 1),
    ]
    complete_step(tmp_path, 1, parts)
    with pytest.raises(EvidenceError, match="column `entropy` is in some parts and not in others"):
        read_record(tmp_path, 1)


def test_a_run_without_records_has_no_steps(tmp_path):
    assert complete_steps(tmp_path) == []
    remove_records_after(tmp_path, 0)


def test_later_and_incomplete_steps_are_forgotten(tmp_path):
    for step in (1, 2, 10):
        write_record(tmp_path, full_record(step=step))
    write_part(tmp_path, full_record(step=0), rank=0)
    (tmp_path / "records" / "notes.txt").write_text("mine")
    remove_records_after(tmp_path, 2)
    left = sorted(p.name for p in (tmp_path / "records").iterdir())
    assert left == ["notes.txt", "step=000001", "step=000002"]


def test_a_removal_that_is_interrupted_leaves_a_step_that_does_not_count(run, monkeypatch):
    def interrupted(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remove_records_after(run, 0)
    assert complete_steps(run) == []


def test_a_step_that_nobody_would_find_is_named(tmp_path):
    (tmp_path / "records" / "step=7").mkdir(parents=True)
    with pytest.raises(EvidenceError, match="Rename it to step=000007"):
        complete_steps(tmp_path)


def test_a_step_written_again_is_the_new_one(run):
    again = full_record(seed=5)
    write_record(run, again)
    assert_same(read_record(run, 1), again)
