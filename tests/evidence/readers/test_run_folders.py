"""Folders of several runs: the newest log is read, and klinic's runs are named."""

import os

import pytest
from foreign_logs import healthy, trl_entries, write_lines

from klinic.errors import EvidenceError
from klinic.evidence.readers import run_folders
from klinic.evidence.readers.find import read_log
from klinic.evidence.readers.run_folders import find_run, join_parts, refuse_several


def write_run(folder, age):
    folder.mkdir()
    write_lines(folder / "metrics.jsonl", trl_entries(healthy(3)))
    os.utime(folder, (1e9 - age, 1e9 - age))


def test_the_newest_of_several_logs_is_read_and_the_others_are_named(tmp_path):
    for age, name in enumerate("abc"):
        write_run(tmp_path / name, age)
    found = find_run(tmp_path)
    assert found.path == tmp_path / "a"
    assert found.notice == f"{tmp_path / 'a'} is the newest of 3 runs. The others: b, c"
    assert find_run(tmp_path / "b").notice == ""


def write_records(folder, age):
    (folder / "records" / "step=000001").mkdir(parents=True)
    (folder / "records" / "step=000001" / "complete.json").write_text("{}")
    os.utime(folder, (1e9 - age, 1e9 - age))


def test_of_runs_with_records_none_is_chosen(tmp_path):
    write_records(tmp_path / "old", 5)
    write_records(tmp_path / "new", 1)
    for read in (find_run, refuse_several):
        with pytest.raises(EvidenceError, match=r"is no run, but has 2 runs: new, old. Give .*new"):
            read(tmp_path)
    refuse_several(tmp_path / "old")
    refuse_several(tmp_path / "missing")


def test_several_logs_of_json_lines_are_named(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        write_lines(tmp_path / name, trl_entries(healthy(3)))
    with pytest.raises(EvidenceError, match=r"2 logs of JSON lines \(a.jsonl, b.jsonl\)"):
        read_log(tmp_path)


def test_folders_that_are_numbered_alike_are_ordered_by_number(tmp_path):
    for name, age in (("exp_002", 100), ("exp_010", 150), ("exp_001", 50)):
        write_run(tmp_path / name, age)
    assert find_run(tmp_path).path.name == "exp_010"


def test_the_two_logs_of_a_resumed_run_are_joined(tmp_path):
    entries = trl_entries(healthy(12))
    parts = {"exp_009": entries[:8], "exp_010": entries[8:]}
    for name, part in parts.items():
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "metrics.jsonl", part)
    for name in parts:
        log = join_parts(read_log(tmp_path / name), tmp_path / name)
        assert (log.steps, log.before.steps) == (tuple(range(9, 13)), tuple(range(1, 9)))


def test_a_run_from_its_start_reads_no_folder_but_the_next_one(tmp_path, monkeypatch):
    for age, name in enumerate(("run", "other", "exp_1", "exp_2", "exp_3")):
        write_run(tmp_path / name, age)
    logs, opened = {}, []
    for name in ("run", "exp_1"):
        logs[name] = read_log(tmp_path / name)
    monkeypatch.setattr(run_folders, "logs_in_folder", lambda folder: opened.append(folder) or [])
    for name, log in logs.items():
        assert join_parts(log, tmp_path / name) is log
    assert opened == [tmp_path / "exp_2"]


def test_a_log_of_another_run_is_not_joined(tmp_path):
    for age, name in enumerate("ab"):
        write_run(tmp_path / name, age)
    assert join_parts(read_log(tmp_path / "a"), tmp_path / "a").before is None
