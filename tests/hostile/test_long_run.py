"""A long run is judged once: findings are kept, exact, and dropped where they may differ."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hostile.long_run import (
    FAULTS,
    Kind,
    add_steps,
    bare_record,
    repeat_steps,
    timed,
    whole_record,
    write_run,
)
from klinic import __file__ as klinic_file
from klinic.checks import CHECKS
from klinic.doctor import judge_workers, record_index, run_diagnosis, segments
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.doctor.findings_cache import FindingsCache
from klinic.doctor.run_diagnosis import diagnose_run
from klinic.errors import EvidenceError
from klinic.evidence import store

STEPS = 26
SOME = ("mask", "nan")  # of the faults; the others by hand


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """Several segments in a short run, whose files are taken for finished at once."""
    monkeypatch.setattr(segments, "LENGTH", 10)
    monkeypatch.setattr(record_index, "RACY_NS", -(10**18))


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "cache").mkdir()
    return FindingsCache(tmp_path / "cache")


@pytest.fixture
def opened(monkeypatch):
    """The steps whose records are read, and those of whose records only the manifest is."""
    steps = {"records": [], "manifests": []}
    read, files = store.read_record, store.read_step_files
    reading = []

    def read_noted(run, step):
        steps["records"].append(step)
        reading.append(step)
        try:
            return read(run, step)
        finally:
            reading.pop()

    def files_noted(run, step):
        if not reading:
            steps["manifests"].append(step)
        return files(run, step)

    monkeypatch.setattr(store, "read_record", read_noted)
    monkeypatch.setattr(store, "read_step_files", files_noted)
    return steps


def plain(run):
    """Return the diagnosis as it is without segments, cache or workers."""
    return json.dumps(diagnose(read_cases(run), CHECKS).to_json())


def looked(run, cache, **how):
    return json.dumps(diagnose_run(run, cache=cache, **how).to_json())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A healthy run, and its diagnosis."""
    run = write_run(tmp_path_factory.mktemp("made") / "run", STEPS)
    return run, plain(run)


@pytest.fixture
def run(made, tmp_path):
    """A copy of it, to be changed."""
    return Path(shutil.copytree(made[0], tmp_path / "run"))


def marked(fault):
    return pytest.param(fault, marks=() if fault in SOME else pytest.mark.slow)


@pytest.mark.parametrize("fault", [marked(fault) for fault in FAULTS])
def test_first_and_second_look_say_what_judging_every_step_says(tmp_path, cache, fault):
    run = write_run(tmp_path / "run", STEPS, Kind(fault=fault, since=13))
    assert [looked(run, cache), looked(run, cache)] == [plain(run)] * 2


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 9))]
)
def test_a_growing_run_says_the_same_with_and_without_the_cache(tmp_path, cache, seed):
    draws = np.random.default_rng(seed)
    fault, since = str(draws.choice(FAULTS)), int(draws.integers(1, STEPS))
    kind = Kind(fault=fault, since=since, seed=seed)
    run, last = write_run(tmp_path / "run", 3, kind), 3
    while last < STEPS:
        more = int(draws.integers(4, 15))
        add_steps(run, range(last + 1, last + more + 1), kind)
        last += more
        assert looked(run, cache) == plain(run)


def test_a_second_look_opens_no_record(tmp_path, cache, opened, monkeypatch):
    monkeypatch.setattr(segments, "LENGTH", 100)
    run = write_run(tmp_path / "run", 300, Kind(make=bare_record))
    first = looked(run, cache)
    opened["records"].clear()
    opened["manifests"].clear()
    assert looked(run, cache) == first
    assert opened == {"records": [], "manifests": []}


def test_a_look_at_new_steps_opens_those_and_the_steps_that_checks_look_back_at(run, cache, opened):
    looked(run, cache)
    add_steps(run, range(STEPS + 1, STEPS + 3))
    opened["records"].clear()
    opened["manifests"].clear()
    looked(run, cache)
    assert opened["records"] == [1, *range(STEPS - 19, STEPS + 3)]
    assert opened["manifests"] == [STEPS + 1, STEPS + 2]


def test_a_copy_of_a_run_is_read_and_not_judged_again(run, tmp_path, cache, opened):
    first = looked(run, cache)
    shutil.copytree(run, tmp_path / "copy")
    opened["records"].clear()
    assert looked(tmp_path / "copy", cache) == first
    assert opened["records"] == []


def change_metric(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[14] = json.dumps({**json.loads(lines[14]), "kl": 7.0})
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def change_run_facts(run):
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "eos_ids": [5]}))


def answer_a_probe(run):
    answer = {"step": 15, "probe": "rescore", "largest": 3.0}
    (run / "probes.jsonl").write_text(json.dumps(answer) + "\n")


def change_record(run):
    """Write a step again with a fault, as large as before and with the time stamps of before."""
    folder = store.step_folder(run, 15)
    before = {path: path.stat() for path in folder.iterdir()}
    record = store.read_record(run, 15)
    emitted_by = record.emitted_by.copy()
    emitted_by[:64] = 1
    store.write_record(run, replace(record, emitted_by=emitted_by))
    for path, about in before.items():
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def forget_a_step(run):
    shutil.rmtree(store.step_folder(run, 15))


@pytest.mark.parametrize(
    "change", [change_metric, change_run_facts, answer_a_probe, change_record, forget_a_step]
)
def test_what_changes_a_finding_is_judged_again(made, run, cache, change):
    looked(run, cache)
    change(run)
    after = plain(run)
    assert looked(run, cache) == after != made[1]


def test_a_damaged_record_is_refused_although_its_findings_are_known(run, cache):
    looked(run, cache)
    part = store.step_folder(run, 15) / "part-00000.parquet"
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)
    with pytest.raises(EvidenceError, match=r"step=000015.*SHA-256"):
        looked(run, cache)


def test_of_several_damaged_records_the_first_is_named(run, cache):
    for step in (24, 13, 15):
        (store.step_folder(run, step) / "part-00000.parquet").write_bytes(b"nothing")
    for _ in range(2):
        with pytest.raises(EvidenceError, match="step=000013"):
            looked(run, cache)


def test_files_that_may_still_change_are_read_again(tmp_path, cache, opened, monkeypatch):
    monkeypatch.setattr(record_index, "RACY_NS", 10**18)
    run = write_run(tmp_path / "run", 5)
    looked(run, cache)
    opened["records"].clear()
    opened["manifests"].clear()
    looked(run, cache)
    assert opened["records"] == []
    assert set(opened["manifests"]) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("damage", [b"\xff" * 50, None])
def test_a_damaged_cache_is_as_none(made, run, tmp_path, cache, damage):
    looked(run, cache)
    for path in (tmp_path / "cache").iterdir():
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if damage is None else damage)
    assert looked(run, cache) == made[1]
    assert looked(run, cache) == made[1]


def test_valid_json_that_is_no_examination_is_as_none(made, run, tmp_path, cache):
    looked(run, cache)
    for path in (tmp_path / "cache").iterdir():
        cache.put(path.stem, {"hypotheses": {"x": 1}, "absent": 3})
    assert looked(run, cache) == made[1]


def test_a_cache_that_cannot_be_written_is_as_none(tmp_path):
    run = write_run(tmp_path / "run", 5)
    assert looked(run, FindingsCache(tmp_path / "not-there")) == plain(run)


def test_the_cache_is_bounded_and_drops_what_was_not_used(tmp_path):
    cache = FindingsCache(tmp_path, most_bytes=5 * 4096)
    for number in range(9):
        cache.put(f"{number}", number)
        os.utime(tmp_path / f"{number}.json", ns=(number, number))
    assert cache.get("0") == 0  # which is used
    cache.trim()
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["0", "5", "6", "7", "8"]


def test_nothing_of_a_run_folder_is_taken_for_a_finding_and_nothing_is_written_there(
    made, run, tmp_path, cache
):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    looked(run, cache)
    shutil.copytree(tmp_path / "cache", run / "findings")
    before |= {path: path.stat().st_mtime_ns for path in run.rglob("*") if "findings" in str(path)}
    (run / "findings").touch()
    assert looked(run, None) == made[1]
    unchanged = {p: t for p, t in before.items() if p.is_file()}
    assert {p: p.stat().st_mtime_ns for p in unchanged} == unchanged


def run_klinic(*arguments, source, cache):
    env = {**os.environ, "PYTHONPATH": str(source), "KLINIC_CACHE": str(cache)}
    command = [sys.executable, "-m", "klinic.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False).stdout


def test_another_source_of_a_check_judges_again(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(Path(klinic_file).parent, source / "klinic")
    run = write_run(tmp_path / "run", 6)
    how = {"source": source, "cache": tmp_path / "cache"}
    before = run_klinic("diagnose", run, "--json", **how)
    check = source / "klinic" / "checks" / "wrong_metric.py"
    check.write_text(
        check.read_text().replace("MAX_RELATIVE_ERROR = 0.02", "MAX_RELATIVE_ERROR = -1.0")
    )
    after = run_klinic("diagnose", run, "--json", **how)
    assert json.loads(before)["cause"] is None
    assert '"wrong-metric",\n      "status": "confirmed"' in after
    assert after == run_klinic("diagnose", run, "--json", "--no-cache", **how)


def test_no_cache_writes_no_cache(tmp_path):
    run = write_run(tmp_path / "run", 3)
    how = {"source": Path(klinic_file).parent.parent, "cache": tmp_path / "cache"}
    first = run_klinic("diagnose", run, "--json", "--no-cache", **how)
    assert not (tmp_path / "cache").exists()
    assert first == run_klinic("diagnose", run, "--json", **how)
    assert (tmp_path / "cache" / "findings").is_dir()


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells it")
def test_all_processes_together_stay_below_300_megabytes(tmp_path):
    kind = Kind(make=bare_record, more=80)
    run = write_run(tmp_path / "run", 20, kind)
    repeat_steps(run, 300, 20, kind)
    env = {**os.environ, "KLINIC_CACHE": str(tmp_path / "cache")}
    code, _, _, memory = timed(sys.executable, "-m", "klinic.cli", "diagnose", str(run), env=env)
    assert code in (0, 1)
    assert 20 < memory < 300


def test_workers_say_the_same_and_are_gone_afterwards(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(run_diagnosis, "LONG", 1)
    run = write_run(tmp_path / "run", 35, Kind(make=bare_record))
    started = keep_started(monkeypatch)
    assert looked(run, cache, workers=1) == plain(run)
    assert [worker._process.is_alive() for worker in started] == [False]


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_worker_that_dies_or_stops_is_not_waited_for(tmp_path, monkeypatch, number):
    monkeypatch.setattr(run_diagnosis, "LONG", 1)
    monkeypatch.setattr(run_diagnosis, "PATIENCE", 1.0)
    run = write_run(tmp_path / "run", 25, Kind(make=bare_record))
    started = keep_started(monkeypatch, then=getattr(signal, number))
    begun = time.monotonic()
    assert looked(run, None, workers=1) == plain(run)
    assert time.monotonic() - begun < 60
    assert [worker._process.is_alive() for worker in started] == [False]


def keep_started(monkeypatch, then=None):
    """Return the workers that are started from now on; each gets a signal at once."""
    started = []

    class Kept(judge_workers.JudgeWorker):
        def __init__(self):
            super().__init__()
            started.append(self)
            if then is not None:
                os.kill(self._process.pid, then)

    monkeypatch.setattr(judge_workers, "JudgeWorker", Kept)
    return started


def test_whole_records_have_every_column_a_check_needs():
    record = whole_record(1)
    needs = {need for check in CHECKS for need in check.needs if need.startswith("record.")}
    assert all(getattr(record, need.removeprefix("record.")) is not None for need in needs)
