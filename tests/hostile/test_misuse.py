"""However the command is misused, it ends with a sentence: no traceback, no bug, no waiting."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks and limits as Linux does")
SAMPLE = 60
WHOLE = 800
WORK = 6.0  # seconds of a processor, for one command
CODES = {0, 1, 2, 4, 130}


def endings(first, last):
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "hostile.misuse", str(first), str(last)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONIOENCODING": "utf-8:surrogateescape"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in ended.stdout.splitlines()]


def wrong_with(ending):
    """Return what is wrong with an ending, or nothing."""
    if ending["code"] not in CODES:
        return f"exit code {ending['code']}"
    if any(sign in ending["said"] for sign in ("Traceback", "Internal error", "Exception ignored")):
        return "a traceback"
    if ending["code"] in {2, 4} and not ending["said"].strip():
        return "no sentence"
    if "\x1b[2J" in ending["said"]:
        return "a terminal would obey it"
    return f"{ending['work']:.1f} s of work" if ending["work"] > WORK else ""


def assert_well(found):
    bad = {ending["seed"]: (wrong_with(ending), ending) for ending in found if wrong_with(ending)}
    assert not bad, json.dumps(bad, indent=1)[:6000]
    slowest = max(ending["work"] for ending in found)
    sys.stderr.write(f"{len(found)} misuses, slowest {slowest:.2f} s of work (limit {WORK:g} s)\n")


def test_a_sample_of_misuse_ends_with_a_sentence():
    found = endings(0, SAMPLE)
    assert len(found) == SAMPLE
    assert_well(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_misuse_ends_with_a_sentence():
    found = endings(0, WHOLE)
    assert len(found) == WHOLE >= 746
    assert_well(found)
    assert len({ending["code"] for ending in found}) > 2


@pytest.mark.parametrize(
    "ending",
    [
        {"code": 3, "said": "x", "work": 0.1},
        {"code": 2, "said": "Traceback (most recent call last)", "work": 0.1},
        {"code": 2, "said": "", "work": 0.1},
        {"code": -9, "said": "x", "work": 0.1},
        {"code": 0, "said": "\x1b[2J", "work": 0.1},
        {"code": 0, "said": "x", "work": 7.0},
    ],
)
def test_what_must_not_be_would_be_seen(ending):
    assert wrong_with(ending)
