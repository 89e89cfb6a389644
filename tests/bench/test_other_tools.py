"""What other doctors said is mapped to causes and counted as the page tells."""

import json
from pathlib import Path

import pytest
from bench.ask_other_tools import RIVALS
from bench.other_tools import (
    BOARD,
    HEALTHY,
    MEANINGS,
    SPEAKERS,
    TOPICS,
    TRUTHS,
    by_chance,
    read,
    summary,
    table,
    verdict,
)

from klinic.checks import CHECKS

DOCS = Path(__file__).parents[2] / "docs" / "explanation"
PAGE = DOCS / "other-doctors.md"
KNOWN = {check.name for check in CHECKS}


def run_of(truth, **said):
    silent = dict.fromkeys(SPEAKERS, ())
    return {"board": BOARD, "truth": [truth], "said": silent | said}


def told():
    lines = (DOCS / "data" / "other-doctors.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_causes_are_those_that_klinic_knows():
    named = set().union(*MEANINGS.values())
    named |= {cause for truth, klinic in TRUTHS.values() for cause in (*truth.split(), klinic)}
    assert named - {HEALTHY, None} <= KNOWN


def test_every_finding_that_was_made_has_a_meaning():
    for run in told():
        for rival in RIVALS:
            assert {finding[0] for finding in run["said"][rival]} <= set(TOPICS[rival])


@pytest.mark.parametrize(
    ("truth", "findings", "expected"),
    [
        ("kl-sign-flipped", ["kl_drift", "plateau"], "first"),
        ("kl-sign-flipped", ["plateau", "kl_drift"], "later"),
        ("kl-sign-flipped", ["plateau"], "else"),
        ("kl-sign-flipped", [], "nothing"),
        (HEALTHY, ["plateau"], "alarm"),
        (HEALTHY, [], "silent"),
    ],
)
def test_a_verdict_is_of_the_first_finding_that_could_mean_the_cause(truth, findings, expected):
    run = run_of(truth, rldoctor=[[name, "WARNING", ""] for name in findings])
    assert verdict(run, "rldoctor") == expected
    assert summary([run])[BOARD, "rldoctor"] == {expected: 1}


def test_whoever_says_the_same_of_every_run_is_right_by_chance():
    always = {"rlwatch": [["loss_nan", "critical", ""]], "klinic": [["equal-rewards"]]}
    runs = [run_of(truth, **always) for truth in ("nan-outside-mask", "step-too-big")]
    assert by_chance(runs, "rlwatch") == 1.0  # as often as it is: once
    assert by_chance(runs, "klinic") == 0.0


def test_a_log_has_the_kl_and_nothing_else_of_klinic(tmp_path):
    rows = [
        {"step": 1, "loss": 0.0, "klinic/kl_k3/mean": 0.2},
        {"step": 2, "loss": 0.0, "klinic/kl_k3/mean": 0.2, "kl": 0.1},
        {"step": 2, "train_loss": 0.0},
    ]
    log = tmp_path / "trainer_state.json"
    log.write_text(json.dumps({"log_history": rows}))
    assert read(log)["log_history"] == [
        {"step": 1, "loss": 0.0, "kl": 0.2},
        {"step": 2, "loss": 0.0, "kl": 0.1},
        {"step": 2, "train_loss": 0.0},
    ]


def test_the_page_has_the_figures_and_the_mapping():
    page = PAGE.read_text()
    assert table(told()) in page
    versions = {json.dumps(run["versions"]) for run in told()}
    assert len(versions) == 1
    for rival, version in told()[0]["versions"].items():
        assert f"{rival} {version}" in page
    for topic, causes in MEANINGS.items():
        findings = [
            f"`{name}`"
            for rival in RIVALS
            for name, about in TOPICS[rival].items()
            if about == topic
        ]
        row = (topic, ", ".join(dict.fromkeys(findings)), ", ".join(sorted(causes)) or "none")
        assert f"| {' | '.join(row)} |" in page
