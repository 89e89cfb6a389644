"""One file that asks nobody for anything, holds what it should, and obeys nothing it quotes."""

import base64
import hashlib
import html
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import VOCABULARY, run_folder

from klinic.report.page import _embed_json, render
from klinic.report.reading import read_run_report

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
    found = re.search(r'<script type="application/json" id="heat-data">(.*?)</script>', page, re.S)
    return json.loads(found[1])


def scripts(page):
    return re.findall(r"<script>(.*?)</script>", page, re.S)


def test_it_holds_the_diagnosis_the_pictures_and_the_tokens(tmp_path):
    story = read_run_report(run_folder(tmp_path / "run", apart=2.0))
    page = render([story])
    assert story.diagnosis.cause is not None
    assert f"<strong>Cause: {story.diagnosis.cause}</strong>" in page
    assert html.escape(story.diagnosis.fix, quote=False) in html.unescape(page)
    assert page.count("<svg ") == 3
    (run,) = data_of(page)
    assert [step["step"] for step in run["steps"]] == [1, 2, 3]
    assert run["steps"][0]["completions"][0]["text"][0].startswith("t")


def test_its_policy_allows_its_own_script_and_nothing_from_anywhere(tmp_path):
    page = render([read_run_report(run_folder(tmp_path / "run"))])
    policy = html.unescape(re.search(r'Content-Security-Policy" content="(.*?)"', page)[1])
    (script,) = scripts(page)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", without_names))
    assert not addresses


def test_hostile_completions_are_text(tmp_path):
    texts = {i: HOSTILE[i % len(HOSTILE)] for i in range(VOCABULARY)}
    page = render([read_run_report(run_folder(tmp_path / "run", texts=texts))])
    assert len(scripts(page)) == 1
    assert page.count("<script") == 2
    assert "<img" not in page
    assert "\x1b" not in page
    assert "\x00" not in page
    assert len(page) < 2_000_000
    (run,) = data_of(page)
    said = {t for s in run["steps"] for c in s["completions"] for t in c["text"]}
    assert "</script><script>alert(" in "".join(sorted(said))  # quoted whole, and harmless


@given(st.text(max_size=60))
@settings(max_examples=300)
def test_nothing_that_is_embedded_can_end_its_element(text):
    embedded = _embed_json([text])
    assert embedded.isascii()
    assert not set("<>&") & set(embedded)
    assert json.loads(embedded) == [text]


def test_two_runs_stand_beside_one_another_with_what_differs(tmp_path):
    first, second = run_folder(tmp_path / "one"), run_folder(tmp_path / "another")
    page = render([read_run_report(first), read_run_report(second)])
    changes = page.index("<td><code>seed</code></td><td>3</td><td>7</td>")
    assert changes < page.index("Curves")  # first, since it is what is compared
    assert len(data_of(page)) == 2


def test_a_run_of_300_steps_stays_below_two_megabytes(tmp_path):
    run = run_folder(tmp_path / "run", steps=300, lengths=(120,) * 8)
    assert len(render([read_run_report(run)]).encode()) < 2_000_000


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
    [(["nowhere"], "is not a folder"), (["a", "b", "c"], "at most two"), (["a"], "no records")],
)
def test_what_cannot_be_shown_is_said(runs, said, tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    done = report(*runs, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
