"""One file that asks nobody for anything, holds what it should, and obeys nothing it quotes."""

import base64
import hashlib
import html
import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import VOCABULARY, record, run_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "evidence" / "readers"))

from foreign_dumps import write_trl

from klinic.checks import CHECKS
from klinic.checks.base import Finding
from klinic.cli.report import read_any_report
from klinic.doctor.diagnosis import Cause, Diagnosis
from klinic.doctor.hypothesis import Hypothesis, Status
from klinic.errors import ConfigError
from klinic.evidence.files import Journal
from klinic.evidence.verdict import Verdict
from klinic.report.evidence_picture import choose_picture
from klinic.report.log_reading import read_log_report
from klinic.report.page import render
from klinic.report.page_data import pack, unpack
from klinic.report.reading import read_run_report
from klinic.report.step_measures import MEASURES
from klinic.report.token_table import step_tokens
from klinic.report.verdict_card import card_of_records

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\x1b[2J\x1b]0;owned\x07",
    "\u202eevil\u202c",
    "a\x00b",
    "]]>--><!--",
    "{{ 7 * 7 }}{% raw %}",
    "x" * 10**6,
    "\ud83d\ude00 \u05d0 \u0301" * 40,
)


def data_of(page):
    """Return the curves and the tokens that a page holds."""
    found = re.search(r'<script type="text/plain" id="report-data">(.*?)</script>', page, re.S)
    return [unpack(part) for part in found[1].split()]


def words_of(run, row):
    return "".join(run["texts"][i] for i in row["text"])


def scripts(page):
    return re.findall(r"<script>(.*?)</script>", page, re.S)


def test_it_holds_the_diagnosis_the_curves_and_the_tokens(tmp_path):
    story = read_run_report(run_folder(tmp_path / "run", apart=2.0))
    page = render([story])
    assert story.diagnosis.cause is not None
    assert f'<p class="headline">{story.diagnosis.headline}</p>' in page
    assert story.card.causes[0].description in page
    curves, tokens = data_of(page)
    titles = [panel["title"] for panel in curves["panels"]]
    assert {"Reward", "KL to the reference, nats", "Policy - sampler, mean gap, nats"} < set(titles)
    (run,) = tokens["runs"]
    assert [step for step, _, _ in run["steps"]] == [1, 2, 3]
    assert words_of(run, run["rows"][0]).startswith("t")


def test_the_evidence_is_the_curve_of_the_cause(tmp_path):
    run = run_folder(tmp_path / "run", steps=6, apart=2.0)
    story = read_run_report(run)
    (shown,) = data_of(render([story]))[0]["runs"]
    assert story.diagnosis.cause == "wrong-metric"
    assert story.picture.curve == "kl"
    assert shown["evidence"]["firstStep"] == story.diagnosis.first_step
    (line,) = shown["evidence"]["lines"]
    assert line["y"] == [0.1] * 6


@pytest.mark.parametrize(("num_judged", "says_older"), [(2, True), (5, False)])
def test_a_cause_may_be_older_than_the_first_step_that_could_be_judged(num_judged, says_older):
    finding = Finding(verdict=Verdict.FAIL, summary="3 of 4")
    hypothesis = Hypothesis(
        check=CHECKS[0],
        finding=finding,
        first_step=4,
        status=Status.CONFIRMED,
        num_judged=num_judged,
        num_failed=2,
        num_judged_since=2,
    )
    cause = Cause(
        name=CHECKS[0].name,
        confidence=0.95,
        summary="3 of 4",
        fix="mend it",
        change={},
        first_step=4,
    )
    diagnosis = Diagnosis(causes=(cause,), hypotheses=(hypothesis,), rivals=(), missing=())
    (card,) = card_of_records(diagnosis).causes
    assert card.may_be_older is says_older


@pytest.mark.parametrize(
    ("cause", "curve"),
    [
        ("stale-sampler", "gap/sampler"),
        ("wrong-reference", "gap/reference"),
        ("wrong-loss-mask", "recorded/trained"),
        ("temperature-on-one-side", "gap/sampler"),
        ("policy-does-not-move", "grad_norm"),
        ("kl-sign-flipped", "kl"),
        ("equal-rewards", "recorded/equal_groups"),
    ],
)
def test_each_cause_has_its_curve(cause, curve):
    logged = {"kl", "reward", "grad_norm", *MEASURES}
    assert choose_picture(cause, 1, logged).curve == curve
    assert choose_picture(cause, 1, set()) is None


def test_every_recorded_log_prob_of_a_token_is_there(tmp_path):
    run = run_folder(tmp_path / "run", steps=1, apart=0.25, moved=0.5)
    (shown,) = data_of(render([read_run_report(run)]))[1]["runs"]
    made = record(1, apart=0.25, moved=0.5)
    for row in shown["rows"]:
        part = slice(made.row_offsets[row["row"]], made.row_offsets[row["row"] + 1])
        for name, field in (("old", "logp_old"), ("sampler", "logp_sampler"), ("ref", "logp_ref")):
            assert row[name] == np.rint(getattr(made, field)[part] * 1000.0).tolist()
        assert row["logp"] is None  # equal to that before the update
        assert row["reward"] == pytest.approx(made.reward[row["row"]], rel=1e-4)
        assert row["masked"] == []


def test_a_log_prob_that_is_not_finite_or_not_recorded_is_no_number(tmp_path):
    made = record(1)
    holed = made.logp_sampler.copy()
    holed[0] = np.nan
    tokens = step_tokens(
        replace(made, logp_sampler=holed, logp_ref=None), {}, num_tokens=99, num_rows=9
    )
    first = next(row for row in tokens.rows if row.row == 0)
    assert first.columns["sampler"][0] is None
    assert isinstance(first.columns["sampler"][1], int)
    assert first.columns["ref"] is None


def test_a_page_holds_the_worst_completions_within_its_limits():
    made = record(1, lengths=(50,) * 8, moved=0.1)
    moved = made.logp_ref.copy()
    moved[250:300] -= 3.0  # completion 5
    tokens = step_tokens(replace(made, logp_ref=moved), {}, num_tokens=120, num_rows=9)
    assert tokens.rows[0].row == 5
    assert [len(row.ids) for row in tokens.rows] == [50, 50, 20]
    assert tokens.rows[2].length == 50
    assert tokens.num_rows == 8


def test_a_stored_proof_of_the_cause_is_shown(tmp_path):
    run = run_folder(tmp_path / "run", apart=2.0)
    cause = read_run_report(run).diagnosis.cause
    proof = {"cause": cause, "changed": "<b>the sampler", "quantity": "gap", "step": 2}
    proof |= {"before": 2.0, "after": 0.5, "confirmed": True}
    (run / "proof.json").write_text(json.dumps(proof))
    page = render([read_run_report(run)])
    assert "Proof: step 2 replayed, confirmed" in page
    assert "One change: &lt;b&gt;the sampler." in page
    assert '<rect width="25.0" height="8"/>' in page
    (run / "proof.json").write_text(json.dumps({**proof, "cause": "another"}))
    assert "Proof:" not in render([read_run_report(run)])
    (run / "proof.json").write_text(json.dumps({**proof, "after": "0.5"}))
    assert "Proof:" not in render([read_run_report(run)])


def test_its_policy_allows_its_own_script_and_style_and_nothing_from_anywhere(tmp_path):
    page = render([read_run_report(run_folder(tmp_path / "run"))])
    policy = html.unescape(re.search(r'Content-Security-Policy" content="(.*?)"', page)[1])
    (script,) = scripts(page)
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]
    assert f"script-src {digest(script)}; style-src {digest(style)};" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    without_licence = page.replace("https://github.com/leeoniya/uPlot", "")
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", without_licence))
    assert not addresses
    assert "innerHTML" not in script


def digest(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_charting_library_is_there_with_its_licence_and_version():
    folder = files("klinic.report") / "vendor"
    assert "(v1.6.32)" in (folder / "uPlot.iife.min.js").read_text(encoding="utf-8")
    assert "MIT License" in (folder / "uPlot.LICENSE").read_text(encoding="utf-8")


def test_hostile_completions_are_text(tmp_path):
    texts = {i: HOSTILE[i % len(HOSTILE)] for i in range(VOCABULARY)}
    page = render([read_run_report(run_folder(tmp_path / "run", texts=texts))])
    assert len(scripts(page)) == 1
    assert page.count("<script") == 2
    assert "<img" not in page
    assert "\x1b" not in page
    assert "\x00" not in page
    assert len(page) < 2_000_000
    (run,) = data_of(page)[1]["runs"]
    assert "</script><script>alert(" in "".join(run["texts"])  # quoted whole, and harmless


@given(st.text(max_size=60))
@settings(max_examples=300)
def test_nothing_that_is_embedded_can_end_its_element(text):
    embedded = pack([text])
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", embedded)
    assert unpack(embedded) == [text]


def test_two_runs_stand_beside_one_another_with_what_differs(tmp_path):
    first, second = run_folder(tmp_path / "one"), run_folder(tmp_path / "another")
    page = render([read_run_report(first), read_run_report(second)])
    changes = page.index("<td><code>seed</code></td><td>3</td><td>7</td>")
    assert changes < page.index("Curves")  # first, since it is what is compared
    curves, tokens = data_of(page)
    assert "equal in every step that both have" in page
    assert curves["parting"] is None
    Journal(first / "metrics.jsonl").append({"step": 1, "kl_coef": 0.1})
    Journal(second / "metrics.jsonl").append({"step": 1, "kl_coef": 0.2})
    page = render([read_run_report(first), read_run_report(second)])
    assert "kl_coef is 0.1 in A and 0.2 in B" in page  # the only difference
    Journal(second / "metrics.jsonl").append({"step": 2, "reward": 0.25})
    page = render([read_run_report(first), read_run_report(second)])
    said = 'part in <a class="place" href="#A-step-2">step 2</a>: reward is 0.666667 in A and 0.25'
    assert said in page
    assert data_of(page)[0]["parting"] == 2
    assert len(tokens["runs"]) == len(curves["runs"]) == 2
    assert {line["run"] for line in curves["panels"][0]["lines"]} == {0, 1}


def test_a_run_of_300_steps_stays_below_one_and_a_half_megabytes(tmp_path):
    run = run_folder(tmp_path / "run", steps=300, lengths=(120,) * 8)
    page = render([read_run_report(run)])
    (shown,) = data_of(page)[1]["runs"]
    assert len(page.encode()) < 1_500_000
    assert sum(len(row["text"]) for row in shown["rows"]) == 40 * 8 * 120


def test_a_scalar_log_has_a_page(tmp_path):
    log = tmp_path / "trainer_state.json"
    entry = {"reward": 0.5, "reward_std": 0.1, "grad_norm": 1.0, "completions/mean_length": 9.0}
    history = [{"step": s, **entry, "kl": 3.0 + s, "loss": 0.1} for s in range(1, 30)]
    log.write_text(json.dumps({"log_history": history}))
    story = read_log_report(log)
    page = render([story])
    curves, tokens = data_of(page)
    assert f'<p class="headline">{html.escape(story.card.headline)}' in page
    assert story.card.tone != "good"
    assert curves["runs"][0]["evidence"]["lines"][0]["y"][0] == 4.0
    assert tokens["runs"][0]["rows"] == []
    assert 'id="tokens-0"' not in page


def test_a_dump_is_converted_first(tmp_path):
    write_trl(tmp_path, steps=1)
    with pytest.raises(ConfigError, match=r"klinic convert .* OUT, and then: klinic report OUT"):
        read_any_report(tmp_path)


def report(*arguments, cwd):
    command = [sys.executable, "-m", "klinic.cli", "report", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_command_writes_the_file_and_says_where(tmp_path):
    run_folder(tmp_path / "run")
    done = report("run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Report: run/report.html" in done.stdout
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("runs", "said"),
    [(["nowhere"], "does not exist"), (["a", "b", "c"], "at most two"), (["a"], "has no records")],
)
def test_what_cannot_be_shown_is_said(runs, said, tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    done = report(*runs, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
