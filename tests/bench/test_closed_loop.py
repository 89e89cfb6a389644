"""The table of the closed loop, from runs that are pretended."""

from xml.etree import ElementTree

import pytest
from bench.closed_loop import FREE, HELD, SEEDS, STEPS, Entry, main, rows, target_of

from bench import arithmetic_runs
from klinic.evidence.files import Journal


@pytest.fixture
def out(tmp_path):
    """Without a controller the KL ends at 0.2; `log_pi` halves it, `band` does not."""
    ends = {FREE: 0.2, "log_pi": 0.11, "band": 0.18}
    for controller, end in ends.items():
        for seed in SEEDS:
            folder = Entry(controller=controller, seed=seed).folder(tmp_path)
            folder.mkdir()
            journal = Journal(folder / "metrics.jsonl")
            for step in range(1, STEPS + 1):
                kl = end if step > STEPS // 2 else 0.0
                journal.append(
                    {"step": step, "kl_k1/mean": kl, "kl_coef": step / STEPS, "loss": 0.0}
                )
            journal.append({"step": STEPS, "eval/accuracy": 0.8, "eval/retention": 1.0})
    return tmp_path


def test_the_target_is_half_of_where_nothing_holds_the_kl(out):
    assert target_of(out) == pytest.approx(0.1)


def test_the_figure_is_the_last_half_over_the_target(out):
    found = {(row[0], row[3]) for row in rows(out, target_of(out))}
    assert found == {(FREE, "2.00"), ("log_pi", "1.10"), ("band", "1.80")}


def test_whole_runs_are_not_made_again_and_the_picture_is_drawn(out, monkeypatch, capsys):
    monkeypatch.setattr(arithmetic_runs.subprocess, "run", None)
    main(["--out", str(out)])
    printed = capsys.readouterr().out
    assert printed.count("\n|") == 2 + (1 + len(HELD)) * len(SEEDS)
    drawn = ElementTree.parse(out / "closed-loop.svg")  # noqa: S314 - we drew it
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == (1 + len(HELD)) * len(SEEDS)
