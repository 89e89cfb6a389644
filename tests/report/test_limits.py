"""Watching and reporting a run whose files are no files, or hold what no run writes."""

import io
import json
import os
import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from made import record, run_folder
from rich.console import Console

from klinic.evidence import tail
from klinic.evidence.files import Journal
from klinic.evidence.store import write_record
from klinic.report import curves
from klinic.report.curves import MetricCurves
from klinic.report.live import Phase, RunWatcher
from klinic.report.live_view import event_line, render_screen, step_line
from klinic.report.reading import read_run_report
from klinic.report.terminal import print_run_report

LONG = 10**400
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="makes pipes and holes")


@pytest.fixture
def run(tmp_path):
    return run_folder(tmp_path / "run")


def look(run):
    with closing(RunWatcher(run)) as follower:
        return follower.take_snapshot()


def shown(sight):
    console = Console(file=io.StringIO(), width=100, height=50)
    return "\n".join(line.plain for line in render_screen(sight, console))


@on_linux
@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "recipe.yaml", ".lock"])
def test_a_pipe_is_not_waited_for(run, name):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    sight = look(run)
    assert name.endswith(("yaml", "lock")) or f"{name}: is not a regular file" in sight.problem


@on_linux
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_endless_zeros_are_not_read(run, name):
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to("/dev/zero")
    assert f"{name}: is not a regular file" in look(run).problem
    (run / name).unlink()
    with (run / name).open("wb") as file:
        file.truncate(200 << 30)
    assert f"{name}: has a line of more than 1 MB at byte 0" in look(run).problem


def test_a_long_journal_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(tail, "AT_ONCE", 1000)
    run = tmp_path / "run"
    run.mkdir()
    lines = [json.dumps({"step": step, "kl": 0.5}) for step in range(1, 301)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    told = []
    with closing(RunWatcher(run)) as follower:
        while (sight := follower.take_snapshot()).has_more:
            told += sight.new_steps
            assert 0 < len(sight.new_steps) < 60
        told += sight.new_steps
    assert [entry["step"] for entry in told] == list(range(1, 301))


def test_few_bytes_are_kept_of_each_line_of_a_journal(tmp_path):
    """A journal of four million lines is remembered in 32 MB, and compared a line at a time."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' * 20_000)
    with closing(tail.JournalTail(path)) as opened:
        assert len(opened.read_update().lines) == 20_000
        assert opened._line_hashes.itemsize * len(opened._line_hashes) == 160_000
        path.with_name("new").write_bytes(b'{"step": 1}\n' * 15_000)
        path.with_name("new").replace(path)
        assert len(opened.read_update().remaining) == tail.MAX_REPEATED


@pytest.mark.parametrize("name", ["reward", "kl", "kl_coef", "time/sample", "num_tokens", "step"])
def test_a_number_of_400_digits_is_shown_as_none(run, name):
    line = {"step": 3, "reward": 0.5, "time/sample": 1.0, "num_tokens": 8, "kl_target": LONG}
    Journal(run / "metrics.jsonl").append({**line, name: LONG, "eval/accuracy": LONG})
    sight = look(run)
    assert "step 3" in shown(sight)
    assert all(len(step_line(step, 9)) < 300 for step in sight.steps)
    assert sight.num_damaged == (name == "step")


def test_numbers_whose_distance_is_beyond_a_float_have_bars(run):
    for value in (-1e308, 1e308):
        Journal(run / "metrics.jsonl").append({"step": 3 + (value > 0), "reward": value})
    assert "▁█" in shown(look(run))


def test_an_event_without_fields_has_a_line():
    assert event_line({"step": LONG, "says": ["x" * 9000]}) == ("?: ['" + "x" * 9000)[:2000]


def test_an_event_is_named_once():
    reference = {"step": 0, "event": "reference", "says": "Reference: copy of a model."}
    assert event_line(reference) == "step 0: Reference: copy of a model."
    ended = {"step": 6, "event": "ended", "says": "Training ended after 6 steps."}
    assert event_line(ended) == "step 6: Training ended after 6 steps."
    assert event_line({"event": "resumed", "step": 6}) == "step 6: resumed"


def test_a_run_of_another_trainer_ends_when_it_says_so(run):
    assert look(run).phase is Phase.GOING
    Journal(run / "events.jsonl").append({"step": 3, "event": "ended", "says": "3 steps."})
    assert look(run).phase is Phase.ENDED
    Journal(run / "metrics.jsonl").append({"step": 4, "reward": 0.5})
    assert look(run).phase is Phase.GOING


def hostile(run):
    """Write what no run writes into every file of a run that a report shows."""
    Journal(run / "metrics.jsonl").append({"step": 3, "reward": LONG, "kl_coef": -LONG})
    Journal(run / "metrics.jsonl").append({"step": LONG, "reward": 1.0, "kl": "text"})
    Journal(run / "metrics.jsonl").append({"step": 2, "reward": 1e308, "rewards/a/mean": LONG})
    for event in ({"step": LONG, "event": "trouble"}, {"step": 2}, {"says": [1]}, {}):
        Journal(run / "events.jsonl").append(event)
    (run / "recovery.json").write_text(json.dumps({"cuts": [{"first": LONG}]}))
    (run / "recipe.yaml").write_bytes(bytes(range(256)))
    made = record(2)
    huge = np.where(np.arange(made.num_tokens) % 2, 1e308, -1e308)
    write_record(run, replace(made, logp_old=huge, logp=huge, logp_ref=-huge, logp_sampler=-huge))


def test_log_probs_and_files_of_no_run_are_shown_in_a_terminal(run):
    hostile(run)
    console = Console(file=io.StringIO(), width=100)
    print_run_report(read_run_report(run), console, step=2)
    assert "steps 1 to 3" in console.file.getvalue()


@on_linux
def test_a_recipe_that_is_no_text_is_named(run):
    with (run / "recipe.yaml").open("wb") as file:
        file.truncate(200 << 30)
    assert "a recipe has at most 1,000,000" in read_run_report(run).recipe


def test_pages_show_what_no_run_writes(run):
    from klinic.report.page import render
    from klinic.report.serving import LivePage

    hostile(run)
    page = render([read_run_report(run)])
    assert "<li>step 2: ?</li>" in page
    assert "is not UTF-8" in page
    assert b"4 events of" in LivePage(run).current_page()


def test_a_page_lists_the_last_events_and_says_how_many_there_are(run):
    from klinic.report.page import render

    line = json.dumps({"step": 2, "event": "trouble", "says": "x" * 300}) + "\n"
    (run / "events.jsonl").write_text(line * 5_000)
    page = render([read_run_report(run)])
    assert "5000 events of" in page
    assert page.count("<li>step 2: trouble: ") == 200


def test_a_long_curve_keeps_its_spikes(monkeypatch):
    monkeypatch.setattr(curves, "MAX_POINTS", 20)
    entries = [{"step": step, "kl": 100.0 if step == 777 else 0.1} for step in range(1, 5_001)]
    steps, values = MetricCurves(entries).downsampled_series("kl")
    assert len(steps) <= 22
    assert (steps[0], steps[-1]) == (1, 5_000)
    assert values[steps.index(777)] == 100.0


def test_a_step_that_was_logged_twice_has_its_last_value():
    found = MetricCurves(
        [{"step": 1, "kl": 1}, {"step": 2, "kl": 2}, {"step": 1, "kl": 3, "reward": 4}]
    )
    assert found.series("kl") == ([1, 2], [3.0, 2.0])
    assert found.series("reward") == ([1], [4.0])


def test_only_some_of_many_rewards_are_kept():
    found = MetricCurves([{"step": 1, **{f"rewards/{i}/mean": i for i in range(1_000)}}])
    assert found.reward_names == [str(i) for i in range(curves.MAX_REWARDS)]
