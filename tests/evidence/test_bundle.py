"""A bundle holds a run without its texts, and a stranger's bundle writes nowhere else."""

import io
import json
import tempfile
import zipfile
from pathlib import Path

import pytest

from evidence.records import full_record
from klinic.errors import EvidenceError
from klinic.evidence import bundle, store
from klinic.evidence.bundle import read_head, unpack_bundle, write_bundle
from klinic.evidence.bundle_head import is_bundle
from klinic.evidence.files import Journal, json_bytes
from klinic.evidence.run_facts import METRICS, write_run_facts, write_tokens
from klinic.evidence.stored_zip import pack_files

VERDICT = {"verdict": "none", "causes": [], "unexplained": []}
HEAD = ("bundle.json", json_bytes({"bundle": 1, "verdict": VERDICT}))


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "secret-project"
    write_run_facts(folder, {"eos_ids": [7], "policy": {"name": "/home/ursula/model"}})
    write_tokens(folder, {n: f"canary{n}" for n in range(99)})
    for step in range(1, 10):
        store.write_record(folder, full_record(step=step, seed=step))
        Journal(folder / METRICS).append({"step": step, "reward": 0.5, "rewards/ursula/mean": 0.5})
    (folder / "recipe.yaml").write_text("model: /home/ursula/model\n")
    Journal(folder / "events.jsonl").append({"step": 1, "says": "canary"})
    return folder


def write(run, **how):
    return write_bundle(run, run.parent / "out.zip", **{"verdict": VERDICT, "anchors": [], **how})


def test_it_has_the_records_and_no_name(run):
    contents = write(run)
    assert (contents.steps, contents.num_recorded) == ([*range(1, 10)], 9)
    assert contents.num_bytes == contents.path.stat().st_size
    assert contents.metrics == ["reward"]
    data = contents.path.read_bytes()
    for word in (b"canary", b"ursula", b"home", b"secret", b"accuracy", b"short"):
        assert word not in data
    with unpack_bundle(contents.path) as folder:
        assert store.complete_steps(folder) == contents.steps
        names = {path.name for path in folder.iterdir()}
        assert names == {"run.json", "metrics.jsonl", "probes.jsonl", "records"}
        assert json.loads((folder / "run.json").read_text())["eos_ids"] == [0]
    assert not folder.exists()


def test_a_large_run_keeps_the_steps_around_its_anchors(run, monkeypatch):
    whole = write(run).num_bytes
    monkeypatch.setattr(bundle, "LARGEST_RECORDS", whole // 2)
    contents = write(run, anchors=[5])
    assert {1, 5, 9} <= set(contents.steps)
    assert len(contents.steps) < contents.num_recorded == 9
    assert contents.num_bytes < whole


def test_a_long_journal_keeps_its_beginning_and_end(run, monkeypatch):
    monkeypatch.setattr(bundle, "LARGEST_JOURNAL", 120)
    write(run)
    with unpack_bundle(run.parent / "out.zip") as folder:
        steps = [entry["step"] for entry in Journal(folder / METRICS).entries()]
    assert (steps[0], steps[-1]) == (1, 9)
    assert len(steps) < 9


def test_records_that_are_too_large_for_any_bundle_are_refused(run, monkeypatch):
    monkeypatch.setattr(bundle, "LARGEST_BUNDLE", 1000)
    with pytest.raises(EvidenceError, match="a bundle has at most"):
        write(run)
    assert not (run.parent / "out.zip").exists()


def archive(path, *files):
    path.write_bytes(pack_files([HEAD, *files]))
    return path


NAMES = (
    *("../evil", "/evil", "records/../../evil", "records/step=000001/../../../evil", "evil"),
    *("recipe.yaml", "tokens.json", "records/step=1/complete.json", "RUN.JSON", "run.json/"),
    *("records/step=000001/part-00000.parquet/x", "C:\\evil", "run.json\n", ".lock", ""),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_bundle_has_is_refused(name, tmp_path, monkeypatch):
    drafts = tmp_path / "drafts"
    drafts.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(drafts))
    path = archive(tmp_path / "bundle.zip", ("run.json", b"{}"), (name, b"evil"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(EvidenceError), unpack_bundle(path):
        pytest.fail("it was unpacked")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_is_a_file_with_its_text(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(zipfile.ZipInfo(HEAD[0]), HEAD[1])
        link = zipfile.ZipInfo("run.json")
        link.external_attr = 0o120777 << 16
        file.writestr(link, b"/etc/passwd")
    (tmp_path / "bundle.zip").write_bytes(buffer.getvalue())
    with unpack_bundle(tmp_path / "bundle.zip") as folder:
        assert not (folder / "run.json").is_symlink()
        assert (folder / "run.json").read_bytes() == b"/etc/passwd"


def test_a_newer_format_and_a_head_that_is_none_are_refused(tmp_path):
    path = tmp_path / "bundle.zip"
    for head in (b'{"bundle": 2}', b"[]", b"", b"{" * 10_000, b'{"bundle": "\x1b[2J"}'):
        path.write_bytes(pack_files([("bundle.json", head)]))
        assert is_bundle(path)
        with pytest.raises(EvidenceError):
            read_head(path)


def test_what_is_no_bundle_is_not_taken_for_one(tmp_path):
    other = tmp_path / "weights.pt"
    other.write_bytes(pack_files([("archive/data.pkl", b"x")]))
    assert not is_bundle(other)
    assert not is_bundle(tmp_path)
    assert not is_bundle(tmp_path / "missing")
    assert not is_bundle(Path("/dev/zero"))
