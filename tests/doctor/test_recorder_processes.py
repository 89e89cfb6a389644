"""A Recorder in each of several processes: one record, one diagnosis, one decision."""

import io
from functools import partial

import numpy as np
import pytest
from rich.console import Console

from klinic import Recorder
from klinic.checks import CHECKS
from klinic.checks.base import Case
from klinic.doctor.cases import read_cases
from klinic.doctor.diagnosis import diagnose
from klinic.doctor.process_cases import ProcessCases
from klinic.errors import ConfigError, EvidenceError, RunStoppedError
from klinic.evidence import store
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import METRICS
from process_threads import run_in_processes

GROUPS = {0: [[1, 1, 1, 2], [0, 0, 0, 1]], 1: [[2, 2, 3, 3], [1, 1, 2, 2]]}
"""Prompts and groups of each rank: group 1 spans both."""


def record_steps(process, folder, *, steps=1, doctor="none", shift=0.0, num=4, **settings):
    """Record steps of `num` random completions for each row of `GROUPS`."""
    random = np.random.default_rng(process.rank)
    prompts, groups = GROUPS[process.rank]
    console = Console(file=io.StringIO())
    recorder = Recorder(
        folder, processes=process, doctor=doctor, eos_ids=[9], console=console, **settings
    )
    with recorder:
        for _ in range(steps):
            ids = random.integers(1, 9, (4 * num, 6))
            ids[:, -1] = 9
            logp = -random.random((4 * num, 6)) - 0.1
            recorder.record_step(
                prompt_ids=np.repeat(np.array(prompts), num)[:, None],
                completion_ids=ids,
                completion_mask=np.ones((4 * num, 6)),
                group=np.repeat(groups, num),
                logp_old=logp,
                logp_sampler=logp - shift,
                reward=random.random(4 * num),
                loss=float(process.rank),
                grad_norm=2.0,
                rescore_difference=0.0,
            )
    return recorder


def test_the_rows_of_both_processes_are_one_record(tmp_path):
    run_in_processes(2, lambda p: record_steps(p, tmp_path / "run", steps=2, num=1))
    assert store.complete_steps(tmp_path / "run") == [1, 2]
    record = store.read_record(tmp_path / "run", 2)
    assert record.process.tolist() == [0] * 4 + [1] * 4
    assert record.group.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert (record.facts["loss"], record.facts["grad_norm"]) == (0.5, 2.0)
    lines = list(Journal(tmp_path / "run" / METRICS).entries())
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[1]["reward"] == pytest.approx(float(record.reward.mean()))


def test_groups_that_only_a_process_numbers_are_kept_apart_by_their_prompts(tmp_path):
    def body(process):
        with Recorder(tmp_path / "run", processes=process, doctor="none") as recorder:
            recorder.record_step(
                prompt_ids=[[process.rank]] * 2, completion_ids=[[5], [6]], group=[0, 0]
            )

    run_in_processes(2, body)
    assert store.read_record(tmp_path / "run", 1).group.tolist() == [0, 0, 1, 1]


def test_all_processes_are_refused_a_folder_with_files(tmp_path):
    (tmp_path / "file").touch()
    results = run_in_processes(2, lambda p: record_steps(p, tmp_path))
    assert all(isinstance(result, ConfigError) for result in results)


def test_all_processes_stop_at_a_certain_cause(tmp_path):
    """The log-probs of rank 1 are those of other weights than it samples with."""
    results = run_in_processes(
        2,
        lambda p: record_steps(
            p, tmp_path / "run", steps=4, doctor="stop", shift=-0.8 * p.rank, num=4
        ),
    )
    assert all(isinstance(result, RunStoppedError) for result in results)
    assert str(results[0]) == str(results[1])


def test_a_fault_of_one_process_is_found_among_its_own_rows(tmp_path):
    """Diluted among the healthy rows, the gap is below its limit."""
    failed = {}
    for shift in (0.0, 0.015):  # the limit is 0.01 nats in the mean
        folder = tmp_path / f"run {shift}"
        body = partial(record_steps, folder=folder, num=20, dtype="fp32")
        run_in_processes(2, lambda p, body=body, shift=shift: body(p, shift=shift * p.rank))
        diagnosis = diagnose(read_cases(folder), CHECKS)
        failed[shift] = {h.check.name: h.finding for h in diagnosis.hypotheses if h.num_failed}
    assert failed[0.0] == {}
    finding = failed[0.015]["unexplained-gap"]
    assert finding.summary.startswith("in the rows of process 1 of 2 alone: ")
    assert finding.measured["process"] == 1


def test_cases_of_processes_share_their_records_over_the_steps(tmp_path):
    run_in_processes(2, lambda p: record_steps(p, tmp_path / "run", steps=3, num=20))
    cases, splitter = list(read_cases(tmp_path / "run")), ProcessCases()
    first, second = (splitter.split(case) for case in cases[1:])
    assert first.keys() == {0, 1}
    assert second[1].earlier[-1] is first[1].record
    assert second[1].measure_cache is not first[0].measure_cache


def test_a_few_tokens_of_a_process_are_not_judged_alone(tmp_path):
    run_in_processes(2, lambda p: record_steps(p, tmp_path / "run", num=1))
    (case,) = read_cases(tmp_path / "run")
    assert ProcessCases().split(case) == {}
    assert ProcessCases().split(Case(record=case.record)) == {}


def test_a_batch_of_one_process_that_is_wrong_is_refused_there(tmp_path):
    def body(process):
        recorder = Recorder(tmp_path / "run", processes=process, doctor="none")
        with pytest.raises(EvidenceError, match="prompt per completion"):
            recorder.record_step(prompt_ids=[[1]], completion_ids=[[5], [6]], group=[0, 0])

    assert run_in_processes(2, body) == [None, None]
