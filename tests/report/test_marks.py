"""What happened, as marks: which kind, where, and not too many."""

import json
import re

import pytest
from made import run_folder

from klinic.doctor.recovery import LRCut, RecoveryPlan
from klinic.evidence.files import Journal
from klinic.report.page import render
from klinic.report.page_data import unpack
from klinic.report.reading import read_run_report
from klinic.report.timeline_events import (
    KINDS,
    MAX_PER_KIND,
    coefficient_changes,
    event_kind,
    timeline_events,
)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"event": "trouble", "act": "skip"}, "skip"),
        ({"event": "trouble", "act": "again"}, "again"),
        ({"event": "trouble", "act": "replay"}, "back"),
        ({"event": "trouble", "act": "roll back"}, "back"),
        ({"event": "reference"}, "reference"),
        ({"event": "kl coefficient held"}, "coefficient"),
        ({"event": "restarted"}, "resumed"),
        ({"event": "diagnosis"}, "cause"),
        ({"event": "something new"}, "other"),
        ({"act": ["a list"]}, "other"),
    ],
)
def test_every_event_is_of_a_kind(event, kind):
    assert event_kind(event) == kind
    assert kind in KINDS


def test_a_learning_rate_that_was_cut_is_a_band(tmp_path):
    plan = RecoveryPlan(cuts=(LRCut(first=3, last=12, factor=0.1),))
    (tmp_path / "recovery.json").write_text(json.dumps(plan.to_json()))
    (mark,) = timeline_events(tmp_path, [], [])
    assert (mark.step, mark.last, mark.kind) == (3, 12, "cut")
    assert mark.description == "learning rate x 0.1, steps 3 to 12"


def test_a_coefficient_that_moves_all_the_time_is_a_curve():
    few = [{"step": step, "kl_coef": 0.1 if step < 5 else 0.2} for step in range(1, 10)]
    assert [mark.step for mark in coefficient_changes("kl_coef", few)] == [5]
    assert coefficient_changes("kl_coef", [{"step": s, "kl_coef": s / 10} for s in range(50)]) == []


def test_there_are_never_too_many(tmp_path):
    events = [{"step": step, "event": "trouble", "act": "again"} for step in range(10_000)]
    marks = timeline_events(tmp_path, events, [])
    assert len(marks) == MAX_PER_KIND
    assert (marks[0].step, marks[-1].step) == (0, 9_999)


def test_the_page_shows_them_with_words_and_a_legend(tmp_path):
    run = run_folder(tmp_path / "run")
    event = {"step": 2, "event": "trouble", "act": "roll back", "says": "NaN <b>\u202e & so on"}
    Journal(run / "events.jsonl").append(event)
    page = render([read_run_report(run)])
    packed = re.search(r'id="report-data">(\S+)', page)[1]
    (mark,) = unpack(packed)["runs"][0]["marks"]
    assert mark["text"] == "step 2: trouble: NaN <b>\u202e & so on"
    assert mark["kind"] == "rolled back"
    assert "rolled back" in page
    assert "batch left out" not in page
