"""The calibration of the scoreboard page is that of its data."""

import importlib.util
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("draw_calibration", DOCS / "draw_calibration.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def verdict(confidence, verdict, named="wrong-groups"):
    return {"set": "s", "read": False, "named": named, "confidence": confidence, "verdict": verdict}


def test_page_and_picture_are_those_of_the_data(script):
    rows = script.read_verdicts()
    page = script.PAGE.read_text()
    assert script.written(page, rows) == page, "run python docs/draw_calibration.py"
    assert script.PICTURE.read_text() == script.draw(rows), "run python docs/draw_calibration.py"
    assert "images/calibration.svg" in page


def test_every_line_is_a_diagnosis_of_its_own(script):
    rows = script.read_verdicts()
    assert len({(row["set"], row["read"], row["case"]) for row in rows}) == len(rows)
    for row in rows:
        assert row["verdict"] in ("right", "wrong", "abstained")
        assert (row["named"] is None) == (row["verdict"] == "abstained")
        assert 0 <= row["confidence"] <= 1


def test_bins_count_named_causes_alone(script):
    rows = [
        verdict(0.95, "right"),
        verdict(0.97, "wrong"),
        verdict(1.0, "right"),
        verdict(0.7, "right"),
        verdict(0.0, "abstained", named=None),
    ]
    bins = list(script.bins_of(rows))
    assert [(b.low, b.num, b.num_right) for b in bins] == [(0.6, 1, 1), (0.95, 3, 2)]
    assert bins[1].fraction == pytest.approx(2 / 3)
    assert bins[1].confidence == pytest.approx(2.92 / 3)


def test_intervals_are_those_of_wilson(script):
    low, high = script.Bin(0.95, 1.0, 18, 14, 1.0).interval
    assert (low, high) == (pytest.approx(0.548, abs=1e-3), pytest.approx(0.910, abs=1e-3))
    assert script.Bin(0.9, 1.0, 5, 5, 0.95).interval[1] == pytest.approx(1.0)


def test_certain_and_right_are_counted_both_ways(script):
    rows = [verdict(0.95, "right"), verdict(0.95, "wrong"), verdict(0.7, "right")]
    (sentence,) = script._sentences(rows)
    assert "1 of 2 causes" in sentence
    assert "1 of 2 right ones" in sentence
