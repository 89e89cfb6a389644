"""`klinic demo` as a process: what it says, where it writes, and how it is stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from commands import klinic

SHORT = ("warm_start.steps=3", "loop.max_steps=2", "loop.eval_every=0", "loop.eval_prompts=8")


@pytest.fixture
def demo(tmp_path, warm_starts):
    env = {**os.environ, "KLINIC_CACHE": str(warm_starts)}
    return lambda *words: klinic("demo", *words, cwd=tmp_path, timeout=200, env=env)


def test_faults_are_listed_with_what_is_broken_and_without_torch(demo):
    done = demo("--list")
    assert done.returncode == 0, done.stderr
    assert "stale-sampler: the sampler keeps old weights\n" in done.stdout
    assert "routing-mismatch" not in done.stdout


def test_faults_are_listed_for_machines(demo):
    told = json.loads(demo("--list", "--json").stdout)
    assert told["faults"][0] == {"name": "stale-sampler", "broken": "the sampler keeps old weights"}
    assert "routing-mismatch" in told["left_out"]


def test_a_name_that_is_nearly_right_is_guessed(demo, tmp_path):
    done = demo("--fault", "stale-samplr")
    assert done.returncode == 2
    assert "Did you mean stale-sampler?" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_recorded_run_is_diagnosed_and_left_for_other_commands(demo, tmp_path):
    done = demo("--recorded")
    assert done.returncode == 0, done.stderr
    for shown in (
        "KL, nats per token ",
        "Cause: stale-sampler",
        "first seen in step 2",
        "The bug in the script: completions come from a second model that is never updated.",
        "klinic diagnose runs/sick ",
    ):
        assert shown in done.stdout
    assert klinic("diagnose", "runs/sick", cwd=tmp_path, timeout=60).returncode == 1
    again = json.loads(demo("--recorded", "--json").stdout)
    assert (again["ok"], again["cause"], again["folder"]) == (True, "stale-sampler", "runs/sick-2")


def test_the_recorded_run_needs_no_torch(tmp_path):
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'trl']));"
        "sys.argv[1:] = ['demo', '--recorded']; from klinic.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Cause: stale-sampler" in done.stdout


def test_the_recorded_run_is_small_and_named_by_its_records(tmp_path):
    from klinic.lab.demo import recorded

    shipped = Path(recorded.__file__).parent / recorded.SHIPPED
    assert sum(file.stat().st_size for file in shipped.rglob("*")) < 300_000
    run = recorded.copy_recorded_run(tmp_path / "run")
    for step in range(2, 17):  # only the first step is left: before the first update
        shutil.rmtree(run / "records" / f"step={step:06d}")
    assert klinic("diagnose", "run", cwd=tmp_path, timeout=60).returncode == 0


@pytest.mark.parametrize("also", ["seed=2", "--fault=stale-sampler"])
def test_a_recorded_run_takes_no_settings(demo, tmp_path, also):
    done = demo("--recorded", also)
    assert done.returncode == 2
    assert "ConfigError: --recorded is given with " in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_recorded_run_overwrites_nothing(demo, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    done = demo("--recorded", "--out", ".")
    assert done.returncode == 2
    assert "ConfigError: --out is ., which is not empty" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed here")
def test_without_torch_it_says_what_to_install(demo):
    done = demo()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.rstrip().endswith('Install it with: pip install "klinic[train]"')
    assert done.stderr.startswith("MissingExtraError: this needs torch")


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_a_second_demo_just_works_and_leaves_the_first_alone(demo, tmp_path):
    done = demo(*SHORT)
    assert done.returncode == 0, done.stderr
    for said in (
        "Step 1 | Reward: ",
        "KL per token, nats: ",
        "Correct answers on held-out sums: ",
        "klinic diagnose runs/demo ",
        "klinic demo --fault stale-sampler",
        "klinic train recipes/arithmetic.yaml",
    ):
        assert said in done.stdout
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs/demo").rglob("*")}
    again = demo(*SHORT, "--json")
    told = json.loads(again.stdout)
    assert (told["command"], told["ok"], told["folder"]) == ("demo", True, "runs/demo-2")
    assert {"accuracy_before", "accuracy_after", "kl", "step"} <= set(told)
    assert first == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs/demo").rglob("*")}


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_a_fault_is_named_proved_and_reported(demo, tmp_path):
    done = demo(*SHORT, "--fault", "temperature-on-one-side", "--out", "sick")
    assert done.returncode == 0, done.stderr
    for said in (
        "Injected fault: temperature-on-one-side\n"
        "  the sampler reports log-probs of the unscaled logits",
        "Step 1 | Cause: temperature-on-one-side (",
        "Cause: temperature-on-one-side, first seen in step 1\n\nEvidence:\n  ✗ ",
        "\nFix:\n  1. Divide the logits",
        "Proof: confirmed.",
        "klinic diagnose sick",
        "klinic explain temperature-on-one-side",
    ):
        assert said in done.stdout
    assert (tmp_path / "sick" / "report.html").is_file() == (find_spec("matplotlib") is not None)


@pytest.mark.torch
def test_a_folder_that_holds_something_is_left_alone(demo, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    done = demo(*SHORT, "--out", "mine")
    assert done.returncode == 2
    assert "ConfigError: --out is mine, which is not empty" in done.stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.torch
def test_a_key_that_is_unknown_is_refused_before_anything_is_trained(demo, tmp_path):
    done = demo("loop.max_step=2")
    assert done.returncode == 2
    assert "loop.max_steps" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_stopped_before_it_began_it_leaves_nothing(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "klinic.cli", "demo", "warm_start.steps=100000"],
        cwd=tmp_path,
        env={**os.environ, "KLINIC_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "runs" / "demo").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=100)
    finally:
        process.kill()
    # Python dies of the signal itself where it came while a dataclass was being made (`exec`), even
    # if it was caught; a shell says 130 for both
    assert process.returncode in {130, -signal.SIGINT}
    assert "Traceback" not in said
    assert not any((tmp_path / "runs").iterdir())
