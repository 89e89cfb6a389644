"""The blind sets that were run: each case has script and truth; verdicts are counted rightly."""

import json
from pathlib import Path

import pytest
from bench.blind.scoring import judge, summary

from klinic.checks import CHECKS

BLIND = Path(__file__).parents[2] / "bench" / "blind"
NAMES = {check.name for check in CHECKS}


@pytest.mark.parametrize(
    ("name", "num", "num_healthy"), [("round2", 54, 18), ("round4", 50, 17), ("threads", 38, 6)]
)
def test_every_case_has_a_script_a_truth_and_names_of_the_catalogue(name, num, num_healthy):
    cases = json.loads((BLIND / name / "mapping.json").read_text())
    assert len(cases) == num
    assert sum(case["decidable"] == "healthy" for case in cases.values()) == num_healthy
    for case, known in cases.items():
        owner, _, script = case.rpartition("/")
        folder = BLIND / name / owner
        scripts = folder / ("scripts" if name == "threads" else "cases")
        assert (scripts / f"{script}.py").is_file()
        assert json.loads((folder / "truth" / f"{script}.json").read_text())["truth"]
        assert set(known["accept"]) <= NAMES


def test_verdicts_are_counted_by_what_can_be_decided():
    sick = {"decidable": "yes", "accept": ["wrong-groups"]}
    named = {"causes": [{"name": "wrong-groups", "confidence": 0.95}]}
    other = {"causes": [{"name": "broken-reward", "confidence": 0.5}]}
    healthy = {"decidable": "healthy", "accept": []}
    verdicts = [
        judge("a", sick, named),
        judge("b", sick, other),
        judge("c", sick, {"causes": []}),
        judge("d", healthy, named),
        judge("e", healthy, {}),
    ]
    assert summary(verdicts) == {
        "yes": {"right": 1, "wrong": 1, "abstained": 1},
        "healthy": {"alarm": 1, "quiet": 1},
        "certain": {"right": 1, "alarm": 1},
    }
