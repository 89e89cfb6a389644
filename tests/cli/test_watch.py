"""A run that another process writes, kills, cuts back and resumes, seen from the outside."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from rich.cells import cell_len

from fake_run_writer import Writer
from klinic.training.signals import stop_event
from terminal import Terminal, obeyed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="writes and reads pseudo-terminals")
WATCH = [sys.executable, "-P", "-m", "klinic.cli", "watch"]
HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07\x1b]52;c;aGk=\x07\x9b31m\u202eevil\x00\u2066[red]" + "\u0301" * 50
)


class Piped:
    """`klinic watch` with its output in a file."""

    def __init__(self, folder, *arguments, env=None):
        self._out = folder.parent / "printed"
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [*WATCH, str(folder), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )

    @property
    def text(self):
        return self._out.read_text()

    def until(self, words, seconds=30):
        limit = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < limit, f"{words!r} never came: {self.text!r}"
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def test_a_run_is_told_a_line_a_step_from_before_it_begins_to_its_end(run):
    with Piped(run, env={"FORCE_COLOR": "1"}) as watch:
        watch.until("no files written yet")
        with Writer(run, max_steps=3) as writer:
            writer("step 1", "step 2")
            watch.until("step 2 of 3 | reward 0.2 | KL/token 0.02 | grad norm 0.5 | entropy 0.3")
            writer('event {"step": 2, "event": "reference", "says": "It is \\u001b[2J now."}')
            watch.until("step 2: reference: It is \\x1b[2J now.")
            writer("step 3", "end")
            assert watch.process.wait(30) == 0
    lines = watch.text.splitlines()
    assert [line.split(" |")[0] for line in lines if " | " in line] == [
        f"step {n} of 3" for n in (1, 2, 3)
    ]
    assert lines[-1] == f"{run}: the run has ended, after step 3."
    assert not obeyed(watch.text)
    assert "\x1b" not in watch.text


def test_half_a_line_waits_for_its_other_half(run):
    with Writer(run) as writer, Piped(run) as watch:
        writer("step 1", "half 2")
        watch.until("step 1 of 9")
        time.sleep(1.2)
        assert "step 2" not in watch.text
        writer("rest")
        watch.until("step 2 of 9 | reward 0.2")


def test_a_run_that_goes_back_is_followed(run):
    with Writer(run) as writer, Piped(run) as watch:
        writer("step 1", "step 2", "step 3")
        watch.until("step 3 of 9")
        writer("back 1")
        watch.until("the run rolled back to step 1")
        writer("step 2")
        limit = time.monotonic() + 20
        while watch.text.count("step 2 of 9") < 2 and time.monotonic() < limit:
            time.sleep(0.05)
    assert watch.text.count("step 1 of 9") == 1
    assert watch.text.count("step 2 of 9") == 2


def test_a_run_that_is_killed_is_waited_for_and_goes_on(run):
    with Piped(run) as watch:
        with Writer(run, max_steps=3) as writer:
            writer("step 1", "half 2")
            watch.until("step 1 of 3")
            writer.process.send_signal(signal.SIGKILL)
            writer.process.wait()
        watch.until("no process is training here")
        assert watch.process.poll() is None
        with Writer(run, max_steps=3) as writer:
            watch.until("the run is in progress, after step 1")
            writer("step 2", "step 3", "end")
            assert watch.process.wait(30) == 0
    assert watch.text.count("step 2 of 3") == 1


def test_a_run_that_stopped_itself_is_over(run):
    with Writer(run) as writer:
        writer(
            "step 1", 'event {"step": 2, "event": "trouble", "act": "stop", "says": "NaN."}', "end"
        )
        with Piped(run) as watch:
            assert watch.process.wait(30) == 0
    assert "the run stopped itself" in watch.text


def test_a_run_that_a_signal_stopped_is_not_taken_for_killed(run):
    with Piped(run) as watch:
        with Writer(run) as writer:
            writer("step 1", f"event {json.dumps(stop_event(1, signal.SIGTERM))}", "end")
        watch.until("stopped by a signal, checkpoint saved, not resumed yet, after step 1.")
        assert watch.process.poll() is None
        assert "step 1: Stopped by SIGTERM and saved. Continue with --resume." in watch.text
        with Writer(run) as writer:
            watch.until("the run is in progress, after step 1")
            writer('event {"step": 1, "event": "resumed"}')
            writer.process.kill()
            writer.process.wait()
        watch.until("no process is training here")


def test_what_does_not_fit_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for arguments, said in (
        (["file"], "is not a folder"),
        (["run", "--port", "1"], "is for --web"),
    ):
        done = subprocess.run(
            [*WATCH, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert said in done.stderr


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 60), (40, 8), (12, 3)])
def test_a_screen_holds_what_fits(run, columns, lines):
    with Writer(run, text=HOSTILE) as writer:
        writer(*(f"step {n}" for n in range(1, 6)))
        with Terminal(*WATCH, str(run), columns=columns, lines=lines) as terminal:
            terminal.until("step 5")
            terminal.read(1.0)
            painted = terminal.painted()
            terminal.press(b"q")
            assert terminal.ended() == 0
    assert not obeyed(terminal.text)
    assert len(painted) <= lines
    assert max(map(cell_len, painted)) <= columns
    if lines >= 24:
        shown = "\n".join(painted)
        assert "step 5 of 9" in shown
        assert "0:04 left" in shown
        assert "0.05 (target 0.05, coef 0.01)" in shown
        assert "- sampler" in shown
        assert "Doctor: no cause named so far." in shown
        assert "\\x1b[2J\\x1b]0;owned" in shown


def test_every_frame_begins_at_the_top(run):
    with Writer(run) as writer, Terminal(*WATCH, str(run), columns=60, lines=12) as terminal:
        for step in range(1, 5):
            writer(f"step {step}")
            terminal.until(f"step {step} of 9")
        terminal.read(0.5)
        painted = terminal.painted()
        terminal.press(b"q")
        assert terminal.ended() == 0
    assert painted[0].startswith(" step 4 of 9 ")
    assert len(painted) == 12


@pytest.mark.parametrize("how", ["q", "ctrl-c", "SIGTERM", "SIGHUP", "end"])
def test_whoever_leaves_finds_the_terminal_as_it_was(run, how):
    with Writer(run, max_steps=2) as writer:
        writer("step 1")
        with Terminal(*WATCH, str(run)) as terminal:
            terminal.until("step 1 of 2")
            if how == "end":
                writer("step 2", "end")
            elif how.startswith("SIG"):
                terminal.process.send_signal(getattr(signal, how))
            else:
                terminal.press({"q": b"q", "ctrl-c": b"\x03"}[how])
            expected = {"SIGTERM": 128 + signal.SIGTERM, "SIGHUP": 128 + signal.SIGHUP}
            assert terminal.ended() == expected.get(how, 0)
            assert terminal.settings_now == terminal.settings
    for taken, given in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):
        assert terminal.text.rindex(given) > terminal.text.rindex(taken)
    assert terminal.text.rindex("\x1b[?7h") > terminal.text.rindex("\x1b[?7l")
    if how == "end":
        assert "the run has ended, after step 2." in " ".join(terminal.text.split())


def test_whoever_puts_it_aside_finds_the_terminal_as_it_was_and_comes_back(run):
    with Writer(run) as writer:
        writer("step 1")
        with Terminal(*WATCH, str(run)) as terminal:
            terminal.until("step 1 of 9")
            terminal.press(b"\x1a")
            terminal.until("\x1b[?1049l")
            terminal.stopped()
            assert terminal.settings_now == terminal.settings
            assert terminal.text.rindex("\x1b[?25h") > terminal.text.rindex("\x1b[?25l")
            assert terminal.text.rindex("\x1b[?7h") > terminal.text.rindex("\x1b[?7l")
            terminal.seen = b""
            writer("step 2")
            terminal.process.send_signal(signal.SIGCONT)
            terminal.until("step 2 of 9")
            assert "\x1b[?1049h" in terminal.text
            terminal.press(b"q")
            assert terminal.ended() == 0
            assert terminal.settings_now == terminal.settings


def test_without_colours_there_are_none(run):
    with Writer(run, moved=3.0) as writer:
        writer("step 1")
        with Terminal(*WATCH, str(run), env={"NO_COLOR": "1"}) as terminal:
            terminal.until("completion")
            terminal.press(b"q")
            assert terminal.ended() == 0
    assert "48;2;" not in terminal.text
    assert "38;2;" not in terminal.text
    assert "[+3.0]" in terminal.text  # the number instead
