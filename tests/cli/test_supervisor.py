"""A run that is lost goes on by itself, and leaves nobody behind.

The processes here are real, and die for real. Only torch is pretended: what would be imported is a
file of the test, so that a run takes as long as its interpreter needs to start.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from klinic.errors import LostError, RankLostError
from process_asserts import is_gone, wait_until_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
NEEDED = ("transformers", "peft", "safetensors", "datasets")
KLINIC = [sys.executable, "-P", "-m", "klinic.cli", "train", "recipe.yaml"]
BEGIN = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

with Path("starts").open("a") as starts:
    starts.write(json.dumps(sys.argv[1:]) + "\\n")
num = len(Path("starts").read_text().splitlines())


def step(folder, number):
    run = Path(folder)
    run.mkdir(parents=True, exist_ok=True)
    (run / ".lock").write_text(str(os.getpid()))
    (run / "recipe.yaml").touch()
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": number}) + "\\n")


def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)


def finish(folder, number):
    step(folder, number)
    (Path(folder) / "checkpoints" / f"step={number:06d}").mkdir(parents=True)
    sys.exit(0)


"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that starts `klinic train` with a pretended torch."""
    monkeypatch.delenv("KLINIC_SUPERVISED", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "recipe.yaml").write_text("{model: tiny, task: arithmetic}")
    (tmp_path / "pretended").mkdir()
    for name in NEEDED:
        (tmp_path / "pretended" / f"{name}.py").write_text("import torch")
    path = f"{tmp_path / 'pretended'}:{os.environ.get('PYTHONPATH', '')}"

    def start(torch, *arguments, before=(), **how):
        (tmp_path / "pretended" / "torch.py").write_text(BEGIN + torch)
        return subprocess.Popen(
            [*before, *KLINIC, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **how,
        )

    return start


def starts(folder):
    path = folder / "starts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_until(is_so):
    limit = time.monotonic() + 15
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_one_that_dies_every_time_is_given_up_with_a_sentence(run, tmp_path):
    process = run("die()")
    printed, said = process.communicate()
    assert process.returncode == LostError.exit_code == 75
    assert len(starts(tmp_path)) == 4
    assert printed.count("model: name=tiny") == 1
    *restarts, last = said.splitlines()
    assert [line.rpartition(": ")[2] for line in restarts] == [
        f"restart {number} of at most 3 without a new step." for number in (1, 2, 3)
    ]
    assert last.startswith("LostError: the run was killed by signal 9 (Killed) after step 0, and 3")


def test_one_that_makes_steps_goes_on_for_as_long_as_it_takes(run, tmp_path):
    """In a folder of its own choice; the fifth time it is well."""
    torch = "step('runs/recipe-2', num)\ndie(11) if num < 5 else finish('runs/recipe-2', 9)"
    (tmp_path / "runs" / "recipe").mkdir(parents=True)
    process = run(torch, "--kl-beta", "0.1", "max_steps=9")
    _, said = process.communicate()
    assert process.returncode == 0, said
    first, *others = starts(tmp_path)
    assert first == ["train", "recipe.yaml", "--kl-beta", "0.1", "max_steps=9"]
    again = ["train", "--resume", *first[1:], 'output.dir="runs/recipe-2"']
    assert others == [again] * 4
    events = lines(tmp_path / "runs" / "recipe-2" / "events.jsonl")
    assert [event["step"] for event in events] == [1, 2, 3, 4]
    assert {(event["event"], event["signal"]) for event in events} == {("restarted", 11)}
    assert all(event["says"] in said and event["seconds"] > 0 for event in events)


def test_steps_that_were_made_before_are_no_progress(run, tmp_path):
    process = run("step('run', min(num, 2))\ndie()", "output.dir=run")
    _, said = process.communicate()
    assert process.returncode == 75
    assert "after step 2, and 3 restarts in a row made no new step" in said
    assert len(starts(tmp_path)) == 5


@pytest.mark.parametrize(
    ("torch", "code", "num"),
    [
        ("from klinic.errors import ConfigError\nraise ConfigError('wrong')", 2, 1),
        ("from klinic.errors import RunStoppedError\nraise RunStoppedError('sick')", 1, 1),
        ("raise TypeError('klinic is wrong')", 3, 1),
        ("die(signal.SIGTERM)", 143, 1),
        ("from klinic.errors import RankLostError\nif num == 1: raise RankLostError('gone')\n"
         "finish('runs/recipe', 100)", 0, 2),
        ("if num == 1: die(signal.SIGABRT)\nraise TypeError('klinic is wrong')", 3, 2),
    ],
)  # fmt: skip
def test_what_a_run_says_is_final_and_what_is_lost_is_not(run, tmp_path, torch, code, num):
    assert issubclass(RankLostError, LostError)
    process = run(torch)
    _, said = process.communicate()
    assert process.returncode == code, said
    assert len(starts(tmp_path)) == num
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("torch", "code", "step"),
    [
        ("os._exit(0)", 0, 0),
        ("sys.exit(0)", 0, 0),
        ("step('run', 3)\nos._exit(0)", 0, 3),
        ("step('run', 3)\nos._exit(3)", 3, 3),
        ("step('run', 3)\nos._exit(1)", 1, 3),
        ("step('run', 3)\nos._exit(143)", 143, 3),
        ("os.closerange(3, 256)\nos._exit(7)", 7, 0),
        ("if os.fork(): os._exit(9)", 9, 0),
    ],
)
def test_an_exit_before_the_last_step_is_on_disk_is_a_failure(run, tmp_path, torch, code, step):
    """Whatever its code: a reward that calls `os._exit(0)` has trained nothing."""
    process = run(torch, "output.dir=run", "max_steps=5")
    _, said = process.communicate()
    assert process.returncode == 2, said
    *_, last = said.splitlines()
    assert last.startswith(
        f"UnfinishedError: the process of the run exited with code {code} after step {step} of 5, "
        "before the last step was saved."
    )
    assert ("Then continue in run with --resume." in last) is (step > 0)
    assert len(starts(tmp_path)) == 1


def test_a_finished_run_that_has_nothing_left_to_do_is_well(run, tmp_path):
    (tmp_path / "run" / "checkpoints" / "step=000007").mkdir(parents=True)
    process = run("step('run', 7)\nsys.exit(0)", "output.dir=run", "max_steps=5", "--resume")
    _, said = process.communicate()
    assert process.returncode == 0, said


@pytest.mark.parametrize("arguments", [["kl.coef=-1"], ["no.such.key=1"], ["--gpus", "2"]])
def test_what_cannot_be_used_starts_nothing(run, tmp_path, arguments):
    process = run("", *arguments)
    printed, said = process.communicate()
    assert process.returncode == 2
    assert said.startswith("ConfigError: ")
    assert not printed
    assert not starts(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_nothing_is_started_again(run, tmp_path, number):
    torch = """
def leave(number, _):
    Path("heard").write_text(str(number))
    os._exit(100 + number)

for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, leave)
Path("ready").touch()
while True:
    time.sleep(0.1)
"""
    process = run(torch)
    wait_until((tmp_path / "ready").exists)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 100 + number
    assert (tmp_path / "heard").read_text() == str(int(number))
    assert len(starts(tmp_path)) == 1


def test_ctrl_c_reaches_the_run_once(run, tmp_path):
    """The terminal sends it to both processes, so the supervisor need not."""
    torch = """
heard = []
signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
Path("ready").touch()
while not heard:
    time.sleep(0.05)
time.sleep(0.5)
os._exit(100 + len(heard))
"""
    keyboard, terminal = os.openpty()
    # the first terminal that the head of a session opens is its own
    opened = ("sh", "-c", 'exec "$@" < "$0"', os.ttyname(terminal))
    process = run(torch, before=opened, start_new_session=True)
    wait_until((tmp_path / "ready").exists)
    os.write(keyboard, b"\x03")
    process.communicate()
    os.close(keyboard)
    os.close(terminal)
    assert process.returncode == 101


def test_a_signal_between_two_starts_is_obeyed(run, tmp_path):
    process = run("die()")
    assert process.stderr.readline().startswith("The run was killed by signal 9 (Killed)")
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    assert len(starts(tmp_path)) == 1


LEAVING = """
child = subprocess.Popen(
    [sys.executable, "-c", '''
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
open(f"left-{os.getppid()}", "w").write(f"{os.getpid()} {other.pid}\\\\n")
time.sleep(1000)
'''], start_new_session=True)
while not Path(f"left-{os.getpid()}").exists() or not Path(f"left-{os.getpid()}").read_text():
    time.sleep(0.01)
"""


def left(folder):
    return [int(pid) for path in folder.glob("left-*") for pid in path.read_text().split()]


def test_nobody_is_left_behind_between_two_starts_and_in_the_end(run, tmp_path):
    """Not even who has a session of its own, and does not listen to SIGTERM."""
    process = run(LEAVING + "die() if num == 1 else finish('runs/recipe', 100)")
    process.communicate()
    assert process.returncode == 0
    assert len(left(tmp_path)) == 4
    assert all(map(is_gone, left(tmp_path)))


def test_a_run_dies_with_its_supervisor(run, tmp_path):
    process = run("step('run', 1)\ntime.sleep(1000)", "output.dir=run")
    lock = tmp_path / "run" / ".lock"
    wait_until(lambda: lock.exists() and lock.read_text())
    assert not is_gone(int(lock.read_text()))
    process.kill()
    process.communicate()
    wait_until_gone([int(lock.read_text())])


@pytest.mark.parametrize("around", [{"KLINIC_SUPERVISED": "0"}, {"RANK": "0"}])
def test_nobody_supervises_where_nobody_shall(run, tmp_path, monkeypatch, around):
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    process = run("Path('pid').write_text(str(os.getpid()))\ndie()")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert int((tmp_path / "pid").read_text()) == process.pid
