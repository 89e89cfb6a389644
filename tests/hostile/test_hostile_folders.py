"""Every command on a hostile run folder ends with a reason or shows it, soon and in little memory.

A sample runs always. The whole, 599 folders, is marked slow; its figures are in docs/log.md.
"""

import sys

import pytest
from hostile_folders import MEMORY, PAGES, SECONDS, attack, summary, wrong_with
from run_folders import FILES, INSTEAD, cases

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="makes pipes, holes and devices")
SAMPLE = 16
NAMED = (
    *("pipe for metrics.jsonl", "pipe for .lock", "endless zeros for metrics.jsonl"),
    *("sparse for metrics.jsonl", "kernel log for recipe.yaml", "noise for recipe.yaml"),
    *("long numbers for metrics.jsonl", "columns: log-probs of 1e308", "far apart", "lying footer"),
    *("one part many times", "text that is no text", "events.jsonl without event"),
    *("memory of itself for run.json", "memory of itself for metrics.jsonl"),
)


def assert_well(endings):
    assert [ending for ending in endings if ending.wrong] == []


def test_there_are_enough_of_them():
    assert len(cases()) >= 365
    assert len(FILES) * len(INSTEAD) >= 300


@pytest.mark.timeout(300)
def test_what_was_found_once_is_refused_or_shown():
    commands = ("diagnose", "terminal", "watch")
    endings = list(attack(names=[f"^{name}$" for name in NAMED], commands=commands))
    assert_well(endings)
    assert len(endings) == len(NAMED) * len(commands)


@pytest.mark.timeout(300)
def test_some_hostile_folders_are_refused_or_shown():
    assert_well(attack(SAMPLE, commands=("diagnose", "terminal", "watch")))


@pytest.mark.timeout(300)
def test_some_hostile_folders_have_a_page():
    pytest.importorskip("matplotlib")
    assert_well(attack(4, seed=1, commands=PAGES))


@pytest.mark.slow
@pytest.mark.timeout(14_400)
def test_all_hostile_folders_are_refused_or_shown():
    endings = list(attack())
    sys.stderr.write(f"{summary(endings)}\n")
    assert_well(endings)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_a_fresh_interpreter_needs_no_more():
    assert_well(attack(40, fresh=True))


@pytest.mark.parametrize(
    ("ending", "wrong"),
    [
        ({"code": 3}, "exit 3"),
        ({"cpu": SECONDS * 100}, "200.0 s"),
        ({"memory": MEMORY + 1}, "301 MB"),
        ({"said": "Traceback (most recent call last)"}, "traceback"),
        ({"said": "\x1b[2J"}, "control characters"),
        ({"code": 2}, "no reason"),
    ],
)
def test_the_judge_sees_what_is_wrong(ending, wrong):
    well = {"code": 0, "cpu": 0.1, "memory": 100, "wall": 1.0, "said": ""}
    assert wrong_with(**well) == ""
    assert wrong in wrong_with(**{**well, **ending})
