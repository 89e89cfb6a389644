"""Runs at a URL: whole states only, no name twice, and nothing but files of a run."""

import hashlib
import json
import secrets
from pathlib import Path

import pytest

from evidence.records import assert_same, full_record
from klinic.errors import ConfigError, EvidenceError, MachineError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.part_merging import merge_parts
from klinic.evidence.remote import object_store, publishing, snapshot
from klinic.evidence.remote.fetching import fetch_run, is_evidence
from klinic.evidence.remote.object_store import ObjectStore
from klinic.evidence.remote.publishing import RunPublisher
from klinic.evidence.remote.snapshot import newest_snapshot
from klinic.evidence.remote.url import url_of_path

pytest.importorskip("fsspec")


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (1, 2):
        store.write_record(folder, full_record(step=step))
        Journal(folder / "metrics.jsonl").append({"step": step})
    (folder / "recipe.yaml").write_text("model: tiny\n")
    (folder / "vllm.log").write_text("of this machine")
    checkpoint = folder / "checkpoints" / "step=000002"
    (checkpoint / "model").mkdir(parents=True)
    (checkpoint / "model" / "model.safetensors").write_bytes(bytes(3_000_000))
    (checkpoint / "manifest.json").write_text("{}")
    (folder / "checkpoints" / "step=000003.unfinished").mkdir()
    (folder / "checkpoints" / "step=000003.unfinished" / "half").write_text("")
    return folder


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    if request.param == "memory":
        return f"memory://{secrets.token_hex(4)}/run"
    return f"file://{tmp_path}/shared/run"


def files_of(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def published(run, url):
    publisher = RunPublisher(run, url)
    publisher.claim()
    return publisher


def test_what_is_fetched_is_what_was_published(run, url, tmp_path):
    published(run, url).close()
    fetch_run(ObjectStore(url), tmp_path / "there")
    there, here = files_of(tmp_path / "there"), files_of(run)
    local = {"vllm.log", "published.json", "checkpoints/step=000003.unfinished/half"}
    assert there == {name: data for name, data in here.items() if name not in local}


def test_a_later_state_writes_only_what_is_new_and_removes_what_no_reader_needs(run, url):
    publisher = published(run, url)
    remote = ObjectStore(url)
    first = set(remote.names("data"))
    store.write_record(run, full_record(step=3))
    Journal(run / "metrics.jsonl").append({"step": 3})
    (run / "checkpoints" / "step=000002" / "model" / "model.safetensors").unlink()
    assert publisher.start() is None
    assert publisher.wait() == ""
    second = set(remote.names("data"))
    assert {name.rpartition("/")[0] for name in second - first} == {
        "data/metrics.jsonl",
        "data/records/step=000003/complete.json",
        "data/records/step=000003/part-00000.parquet",
    }
    assert first <= second
    for _ in range(publishing.NUM_KEPT):
        publisher.start()
        publisher.wait()
    left = set(remote.names("data"))
    assert {name.rpartition("/")[0] for name in second - left} == {
        "data/metrics.jsonl",
        "data/checkpoints/step=000002/model/model.safetensors",
    }
    assert len(remote.names("manifests")) == publishing.NUM_KEPT
    publisher.finish()


def test_a_state_that_was_not_finished_is_no_state(run, url, monkeypatch, tmp_path):
    publisher = published(run, url)
    before = newest_snapshot(ObjectStore(url))
    store.write_record(run, full_record(step=3))

    def fail(*_):
        raise FileNotFoundError("the network is gone")

    monkeypatch.setattr(publishing, "write_snapshot", fail)
    publisher.start()
    assert "the network is gone" in publisher.wait()
    assert newest_snapshot(ObjectStore(url)) == before
    name = f"manifests/{99:08d}-{hashlib.sha256(b'cut short').hexdigest()}.json"
    ObjectStore(url).write(name, b"cut")  # torn: another digest
    assert newest_snapshot(ObjectStore(url)) == before
    monkeypatch.setattr(publishing, "write_snapshot", fail)
    with pytest.raises(MachineError, match="end of the run is not there"):
        publisher.finish()


def test_of_two_writers_the_one_that_was_continued_stops(run, url):
    old = published(run, url)
    new = published(run, url)
    old.start()
    with pytest.raises(MachineError, match="another process continued this run"):
        old.wait()
    new.start()
    assert new.wait() == ""
    new.finish()


def test_merged_and_dropped_steps_are_published_as_they_are_then(run, url, tmp_path):
    parts = [store.write_part(run, full_record(step=4), rank) for rank in range(9)]
    store.complete_step(run, 4, parts)
    publisher = published(run, url)
    before = store.read_record(run, 4)
    merge_parts(run, 4)
    store.remove_records_after(run, 4)
    publisher.finish()
    fetch_run(ObjectStore(url), tmp_path / "there")
    assert_same(store.read_record(tmp_path / "there", 4), before)
    assert len(list(store.step_folder(tmp_path / "there", 4).glob("part-*"))) == 1


def test_a_copy_for_readers_has_no_weights_and_is_brought_up_to_date(run, url, tmp_path):
    publisher, copy = published(run, url), tmp_path / "copy"
    fetch_run(ObjectStore(url), copy, wanted=is_evidence)
    assert not (copy / "checkpoints").exists()
    unchanged = (copy / "recipe.yaml").stat().st_mtime_ns
    Journal(run / "metrics.jsonl").append({"step": 3})
    store.remove_records_after(run, 1)
    publisher.finish()
    fetch_run(ObjectStore(url), copy, wanted=is_evidence)
    assert store.complete_steps(copy) == [1]
    assert (copy / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert (copy / "recipe.yaml").stat().st_mtime_ns == unchanged


def test_damaged_content_is_refused(run, url, tmp_path):
    published(run, url).close()
    remote = ObjectStore(url)
    name = next(name for name in remote.names("data") if "part-" in name)
    remote.write(name, b"something else")
    with pytest.raises(EvidenceError, match="is not what its name says"):
        fetch_run(remote, tmp_path / "there")


@pytest.mark.parametrize(
    "name",
    [
        *("../evil", "/etc/passwd", "records/../../evil", "records//evil", ".lock", "records"),
        *("records/.hidden", "published.json", "evil.py", "start/a\nb", "records\\evil"),
    ],
)
def test_a_manifest_names_files_of_a_run_only(tmp_path, name):
    url = f"file://{tmp_path}/shared"
    content = {"schema": 1, "generation": 1, "writer": "a", "files": {name: ["0" * 64]}}
    data = json.dumps(content).encode()
    digest = hashlib.sha256(data).hexdigest()
    ObjectStore(url).write(f"manifests/00000001-{digest}.json", data)
    with pytest.raises(EvidenceError, match="which is no file of a run"):
        fetch_run(ObjectStore(url), tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_newer_format_is_refused(tmp_path):
    url = f"file://{tmp_path}/shared"
    data = json.dumps({"schema": 2, "generation": 1, "writer": "a", "files": {}}).encode()
    name = f"manifests/00000001-{hashlib.sha256(data).hexdigest()}.json"
    ObjectStore(url).write(name, data)
    with pytest.raises(EvidenceError, match="Update klinic"):
        newest_snapshot(ObjectStore(url))


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("s3://me:no@bucket/run", "holds a password"),
        ("simplecache::s3://bucket/run", "joins several file systems"),
        ("nosuch://bucket/run", "cannot be opened"),
        ("memory://", "no folder for the run"),
    ],
)
def test_urls_that_cannot_work_are_refused(url, match):
    with pytest.raises(ConfigError, match=match):
        ObjectStore(url)


def test_a_link_in_a_run_is_not_published(run, url, tmp_path):
    (tmp_path / "secret").write_text("mine")
    model = run / "checkpoints" / "step=000002" / "model"
    (model / "extra.json").symlink_to(tmp_path / "secret")
    published(run, url).close()
    assert not any("extra" in name for name in newest_snapshot(ObjectStore(url)).files)


def test_without_fsspec_a_sentence_says_what_to_install(monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *arguments, **keywords):
        if name == "fsspec":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(object_store.MissingExtraError, match="pip install fsspec"):
        ObjectStore("memory://run")


def test_a_path_that_was_a_url_is_a_url_again():
    assert url_of_path(Path("memory://a/b")) == "memory://a/b"
    assert url_of_path(Path("runs/a")) is None
    assert snapshot.object_name("run.json", "0") == "data/run.json/0"
