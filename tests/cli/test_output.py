"""A command outlives the reader of its output, and its exit code stays the truth."""

import subprocess
import sys
from pathlib import Path

import pytest

from klinic.cli.watch import open_keyboard

KLINIC = [sys.executable, "-P", "-m", "klinic.cli"]
PRINTS = (
    "import sys, time\nfrom klinic.cli import app\n"
    "from klinic.cli.output import ignore_write_errors\n"
    "def prints():\n    if {lasting}:\n        ignore_write_errors()\n"
    "    for number in range(20000):\n        print('a line of a run', number)\n"
    "    print('ended', file=sys.stderr)\n    sys.exit({code})\n"
    "app.app = prints\napp.main()"
)


def program(*, code=0, lasting=False):
    return [sys.executable, "-c", PRINTS.format(code=code, lasting=lasting)]


@pytest.mark.parametrize("code", [0, 1])
def test_a_reader_that_leaves_changes_no_exit_code(code):
    process = subprocess.Popen(
        program(code=code), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "a line of a run 0\n"
    process.stdout.close()
    assert process.stderr.read() == "ended\n"
    process.stderr.close()
    assert process.wait() == code


def test_a_reader_of_both_streams_that_leaves_changes_nothing_either():
    process = subprocess.Popen(program(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process.stdout.close()
    assert process.wait() == 0


def test_an_answer_that_cannot_be_written_is_a_fault_of_the_machine():
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [*KLINIC, "explain"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 4
    assert ended.stderr.startswith("MachineError: No space left on device (OSError")


def test_a_run_goes_on_without_its_log():
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            program(lasting=True), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 0
    assert ended.stderr == (
        "standard output cannot be written (No space left on device): output is dropped.\nended\n"
    )


def test_a_thread_that_does_not_end_keeps_no_command_from_ending():
    threads = (
        "import sys, threading, time\nfrom klinic.cli import app, process_exit\n"
        "from klinic.runtime.user_code import guard_process\nprocess_exit.GRACE = 0.2\n"
        "def starts():\n    with guard_process('the reward slow'):\n"
        "        threading.Thread(target=time.sleep, args=(100,), name='sleeper').start()\n"
        "    print('answer')\n    sys.exit(1)\n"
        "app.app = starts\napp.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", threads], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (1, "answer\n")
    assert ended.stderr == (
        "Thread sleeper, started by the reward slow, does not end: exiting without it.\n"
    )


@pytest.mark.parametrize("missing", ["termios", "tty"])
def test_where_terminals_have_no_keys_none_is_waited_for(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with open_keyboard() as keys:
        assert keys.wait_key(0.0) == ""


def test_without_standard_input_no_key_is_waited_for(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with open_keyboard() as keys:
        assert keys.wait_key(0.0) == ""


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(400)
def test_a_whole_run_outlives_its_reader(tmp_path):
    (tmp_path / "recipe.yaml").write_text("{model: tiny, task: arithmetic}")
    small = ["max_steps=3", "loop.eval_prompts=1", "loop.prompts_per_step=2", "group_size=2"]
    process = subprocess.Popen(
        [*KLINIC, "train", "recipe.yaml", "output.dir=run", "warm_start.steps=5", *small],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    process.stdout.readline()
    process.stdout.close()  # as head -1 does
    assert process.wait() == 0
    assert (tmp_path / "run" / "checkpoints" / "step=000003").is_dir()
