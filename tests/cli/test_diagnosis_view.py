"""How a diagnosis of records is printed: verdict, evidence, fix, commands, folded rest."""

import io

import pytest
from rich.console import Console

from klinic.checks import CHECKS
from klinic.checks.base import failed_finding, passed_finding, warning_finding
from klinic.cli.diagnosis_view import print_diagnosis
from klinic.doctor.diagnosis import conclude
from klinic.doctor.hypothesis import Hypothesis
from klinic.replay.provable import PROVABLE_CAUSES

SUMMARY = "the gap is 0.3 nats " * 12 + "(limit 0.01)"


def hypothesis(check, finding):
    one = Hypothesis(check=check)
    if finding is not None:
        for step in (1, 2, 3):
            one.add_finding(step, finding)
    return one


def diagnosis(**findings):
    """Return a diagnosis in which every other check passed."""
    judged = {name.replace("_", "-"): finding for name, finding in findings.items()}
    passed = passed_finding("all is well")
    return conclude([hypothesis(c, judged.get(c.name, passed)) for c in CHECKS], frozenset())


def printed(of, tmp_path, *, width=None, every=False):
    terminal = width is not None
    file = io.StringIO()
    console = Console(
        file=file, width=width or 80, force_terminal=terminal, color_system=None, highlight=False
    )
    print_diagnosis(of, console, run=tmp_path, every=every)
    return file.getvalue()


def test_the_verdict_comes_first_and_the_folded_rest_last(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: tiny\n")
    found = diagnosis(stale_sampler=failed_finding(SUMMARY), ranks_diverge=None)
    lines = printed(found, tmp_path).splitlines()
    assert lines == [
        "Cause: stale-sampler, first seen in step 1",
        "",
        "Evidence:",
        f"  ✗ stale-sampler: {SUMMARY}",
        "",
        "Fix:",
        *[line for line in lines if line.startswith("  1. ")],
        "",
        "Next:",
        *[line for line in lines if line.startswith("  klinic ")],
        "",
        f"{len(CHECKS) - 2} ruled out, 1 without evidence (`--all` lists them)",
    ]
    commands = [line.split("  ")[1] for line in lines if line.startswith("  klinic ")]
    assert commands == [f"klinic diagnose {tmp_path} --prove", "klinic explain stale-sampler"]


def test_a_run_without_a_fault_is_two_lines(tmp_path):
    lines = printed(diagnosis(), tmp_path).splitlines()
    assert lines == [
        f"No fault found: all {len(CHECKS)} checks passed.",
        "",
        f"{len(CHECKS)} ruled out (`--all` lists them)",
    ]


def test_a_warning_is_shown_and_not_folded(tmp_path):
    text = printed(diagnosis(step_too_big=warning_finding("it grows")), tmp_path)
    assert "  ! step-too-big: it grows\n" in text
    assert f"{len(CHECKS) - 1} ruled out (" in text


def test_all_lists_every_check_once(tmp_path):
    found = diagnosis(stale_sampler=failed_finding(SUMMARY), ranks_diverge=None)
    text = printed(found, tmp_path, every=True).partition("\nNext:")[2]
    for check in CHECKS:
        mark = {"stale-sampler": "✗", "ranks-diverge": "?"}.get(check.name, "✓")
        assert text.count(f"  {mark} {check.name}: ") == 1
    assert "--all" not in text


@pytest.mark.parametrize("width", [60, 100, 200])
def test_a_terminal_of_any_width_breaks_no_word(tmp_path, width):
    found = diagnosis(stale_sampler=failed_finding(SUMMARY), wrong_groups=failed_finding(SUMMARY))
    text, whole = printed(found, tmp_path, width=width), printed(found, tmp_path)
    assert text.split() == whole.split()
    wide = [line for line in text.splitlines() if len(line) > width]
    assert [line for line in wide if not line.startswith("  klinic ")] == []


def test_the_proof_is_offered_only_where_a_replay_can_run(tmp_path):
    found = diagnosis(stale_sampler=failed_finding(SUMMARY))
    assert "--prove" not in printed(found, tmp_path)
    (tmp_path / "recipe.yaml").write_text("model: tiny\n")
    assert "--prove" in printed(found, tmp_path)
    assert "--prove" not in printed(diagnosis(reward_hacking=failed_finding("x")), tmp_path)
    (tmp_path / "run.json").write_text('{"schema": 1, "trainer": "trl"}')
    assert "--prove" not in printed(found, tmp_path)


def test_text_of_a_run_is_shown_and_not_obeyed(tmp_path):
    text = printed(diagnosis(stale_sampler=failed_finding("a\x1b[2J[red]b")), tmp_path)
    assert "a\\x1b[2J[red]b" in text


@pytest.mark.torch
def test_the_causes_with_a_proof_are_those_of_the_replay():
    from klinic.replay.changes import CHANGES

    assert set(CHANGES) == PROVABLE_CAUSES
