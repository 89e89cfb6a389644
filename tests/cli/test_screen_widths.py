"""Terminals of 60, 100 and 200 columns: no word is broken, nothing is cut."""

import io
import os
import pty
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest
from rich.console import Console

from klinic.cli.log_view import print_log_diagnosis
from klinic.doctor.scalars.examine import examine_log
from klinic.evidence.readers.log import LogBuilder
from klinic.lab.demo.recorded import copy_recorded_run
from klinic.report.live import RunWatcher
from klinic.report.live_view import render_screen

WIDTHS = (60, 100, 200)
ENTRY = {"mean_reward": 0.5, "grad_norm": 0.3, "lr": 1e-6, "completions/mean_length": 40.0}


def terminal(width, height=60):
    return Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None
    )


def log_screen(kl, width, *, every):
    builder = LogBuilder()
    for step in range(1, 61):
        builder.add(step, {**ENTRY, "kl_div": kl})
    console = terminal(width)
    log = builder.build_log(format="CSV", files=(Path("own.csv"),))
    print_log_diagnosis(examine_log(log), console, every=every)
    return console.file.getvalue()


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("kl", [15.0, 0.001])
def test_the_diagnosis_of_a_log_is_whole_at_every_width(kl, every):
    screens = {width: log_screen(kl, width, every=every) for width in WIDTHS}
    assert "Read as: kl = kl_div," in screens[200]
    for width, text in screens.items():
        assert text.split() == screens[200].split()
        assert [line for line in text.splitlines() if len(line) > width] == []


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    with closing(
        RunWatcher(copy_recorded_run(tmp_path_factory.mktemp("watch") / "run"))
    ) as watcher:
        while (one := watcher.take_snapshot()).has_more:
            pass
        return one


@pytest.mark.parametrize("width", WIDTHS)
def test_a_live_screen_shows_verdict_and_events_to_their_last_word(snapshot, width):
    lines = [line.plain for line in render_screen(snapshot, terminal(width))]
    words = " ".join(" ".join(lines).split())
    assert f"{snapshot.verdict.strip()} " in words
    event = "Reference: copy of runs/first/start, weights equal to those of the initial policy"
    assert event in words
    assert max(map(len, lines)) <= width


def test_a_sentence_without_room_says_that_it_goes_on(snapshot):
    lines = [line.plain for line in render_screen(snapshot, terminal(20))]
    start = next(i for i, line in enumerate(lines) if line.startswith(" Cause:"))
    assert lines[start + 5].endswith(" ...")


@pytest.mark.parametrize(
    "words",
    [
        ("diagnose", "a-folder-that-is-not-there"),  # an error of klinic
        ("diagnose", "runs", "--not-an-option"),  # an error of the options
        ("demo", "--list"),
        ("ablate", "--help"),
    ],
)
def test_plain_messages_are_wrapped_between_words_on_a_terminal(words, tmp_path):
    lines = terminal_lines(words, 60, tmp_path)
    assert max(map(len, lines)) < 60
    wide = terminal_lines(words, 1000, tmp_path)
    assert {word for line in lines for word in line.split()} - {"\\"} <= {
        word for line in wide for word in line.split()
    }


def terminal_lines(words, width, folder):
    """Return what a command prints on a terminal of this width."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "klinic.cli", *words]
    environment = {**os.environ, "COLUMNS": str(width), "NO_COLOR": "1"}
    with subprocess.Popen(
        command, stdout=follower, stderr=follower, cwd=folder, env=environment
    ) as process:
        os.close(follower)
        chunks = []  # reading ends with an error
        with (
            suppress(OSError),
            os.fdopen(leader, "rb", buffering=0) as screen,
        ):  # ends with an error
            while chunk := screen.read(4096):
                chunks.append(chunk)
    assert process.returncode in {0, 2}
    return b"".join(chunks).decode().replace("\r", "").splitlines()
