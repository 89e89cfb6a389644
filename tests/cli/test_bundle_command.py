"""`klinic bundle`: what it writes and prints, and that its verdict is that of the run."""

import json
import subprocess
import sys

import pytest

from fixture_run import copy_fixture
from klinic.cli.bundle import short_verdict
from klinic.cli.diagnose import diagnose_bundle
from klinic.evidence.bundle import write_bundle
from tabular_loop import diagnose_loop

KLINIC = [sys.executable, "-P", "-m", "klinic.cli"]


def klinic(*arguments):
    return subprocess.run(
        [*KLINIC, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=100
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return copy_fixture(tmp_path_factory.mktemp("bundled"))


def test_it_is_written_shown_and_diagnosed(run):
    made = klinic("bundle", run)
    assert made.returncode == 0, made.stderr
    first, *_, last = made.stdout.splitlines()
    assert first.startswith(f"Wrote {run / 'bundle.zip'} (")
    assert first.endswith("4 of 4 steps")
    assert "token_ids" in made.stdout
    assert "Left out: texts, the recipe" in made.stdout
    assert (
        last == "Verdict of the run and of the bundle: Cause: random-weights, first seen in step 1"
    )
    read = klinic("diagnose", run / "bundle.zip", "--json")
    told = json.loads(read.stdout)
    assert read.returncode == 1
    assert told["cause"] == "random-weights"
    whole = json.loads(klinic("diagnose", run, "--json").stdout)
    assert told == whole


def test_json_has_what_is_in_it_and_both_verdicts(run, tmp_path):
    made = klinic("bundle", run, tmp_path / "out.zip", "--json")
    told = json.loads(made.stdout)
    assert (told["command"], told["ok"]) == ("bundle", True)
    assert told["verdict"] == told["verdict_of_bundle"]
    assert told["path"] == str(tmp_path / "out.zip")
    assert (told["steps"], told["num_tokens"]) == ([1, 2, 3, 4], 63)


def test_a_report_of_a_bundle_has_ids_instead_of_texts(run, tmp_path):
    write_bundle(run, tmp_path / "b.zip", verdict={}, anchors=[])
    made = klinic("report", tmp_path / "b.zip")
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "b.zip.html").read_text().count("random-weights")


def test_what_cannot_be_bundled_is_refused_with_a_reason(run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "log.jsonl").write_text('{"step": 1, "reward": 1}\n')
    for words, reason in (
        ((run, tmp_path / "notes.txt"), "exists and is not a bundle"),
        ((tmp_path / "log.jsonl",), "klinic convert"),
    ):
        refused = klinic("bundle", *words)
        assert refused.returncode == 2
        assert reason in refused.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_bundle_is_diagnosed_and_not_replayed(run, tmp_path):
    write_bundle(run, tmp_path / "b.zip", verdict={}, anchors=[])
    plain = klinic("diagnose", tmp_path / "b.zip")
    ended = klinic("diagnose", tmp_path / "b.zip", "--prove")
    assert ended.returncode == plain.returncode
    assert ended.stdout.startswith(plain.stdout.splitlines()[0])
    assert "Proof: not possible: a bundle has no weights to replay a step with." in ended.stdout


def test_the_recorded_run_of_a_small_vocabulary_keeps_its_verdict(tmp_path):
    from klinic.lab.demo.recorded import copy_recorded_run

    run = copy_recorded_run(tmp_path / "sick")
    ended = klinic("bundle", run, "-o", tmp_path / "b.zip")
    assert ended.returncode == 0, ended.stdout
    assert "Verdict of the run and of the bundle: Cause: stale-sampler" in ended.stdout


LOOPS = {
    "healthy": {"updates": 2},
    "KL maximised": {"kl_factor": -1.0},
    "equal rewards": {"equal_every": 1},
    "two processes": {"processes": 2, "sends_gradients": False},
    "advantages misplaced": {"advantage_shift": 1, "by_token": True},
}


@pytest.mark.parametrize("settings", LOOPS.values(), ids=list(LOOPS))
def test_a_bundle_has_the_verdict_of_its_run(settings, tmp_path):
    diagnosis = diagnose_loop(tmp_path / "run", **{"steps": 6, **settings})
    write_bundle(tmp_path / "run", tmp_path / "b.zip", verdict={}, anchors=[])
    again = diagnose_bundle(tmp_path / "b.zip")
    assert short_verdict(again) == short_verdict(diagnosis)
    assert again.to_json() == diagnosis.to_json()
