"""The progress of a warm start: written by the run, shown by `klinic watch`."""

import io
from contextlib import closing

import pytest
from rich.console import Console

from klinic.cli.watch import _print_warm_start
from klinic.evidence.warm_start_status import FILE, WarmStartFile, read_warm_start
from klinic.report.live import RunWatcher
from klinic.report.live_view import render_screen


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def screen(run, *, width=80):
    console = Console(file=io.StringIO(), width=width, height=24, color_system=None)
    with closing(RunWatcher(run)) as watcher:
        return [line.plain for line in render_screen(watcher.take_snapshot(), console)]


def test_it_is_written_once_a_second_and_removed_at_the_end(tmp_path):
    clock = Clock()
    file = WarmStartFile(tmp_path, clock)
    file.write(1, 100, 2.0)
    clock.now += 0.5
    file.write(2, 100, 1.0)
    assert read_warm_start(tmp_path).step == 1
    clock.now += 0.5
    file.write(3, 100, float("nan"))
    status = read_warm_start(tmp_path)
    assert (status.step, status.num_steps, status.loss) == (3, 100, None)
    assert status.seconds_left == pytest.approx(97 / 3)
    file.remove()
    assert list(tmp_path.iterdir()) == []
    assert read_warm_start(tmp_path) is None


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = WarmStartFile(None)
    file.write(1, 2, 1.0)
    file.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("width", [60, 100, 200])
def test_it_is_on_the_screen(tmp_path, width):
    clock = Clock()
    file = WarmStartFile(tmp_path, clock)
    file.write(1, 900, 2.0)
    clock.now += 30
    file.write(90, 900, 0.4)
    (tmp_path / "recipe.yaml").write_text("model: tiny\ntask: arithmetic\n")
    assert " █░░░░░░░░░ warm start 90 of 900 | loss 0.4 | 4:30 left" in screen(
        tmp_path, width=width
    )


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"step": -1, "num_steps": 3}',
        '{"step": 9, "num_steps": 3}',
        '{"step": "\\u001b[2J", "num_steps": 3}',
        '{"step": true, "num_steps": 3}',
    ],
)
def test_a_file_of_nonsense_is_ignored(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert read_warm_start(tmp_path) is None


@pytest.mark.parametrize("seconds", ["1e400", '"x"', "null", "-5"])
def test_a_time_of_nonsense_does_no_harm(tmp_path, seconds):
    (tmp_path / FILE).write_text(f'{{"step": 1, "num_steps": 3, "seconds": {seconds}}}')
    (tmp_path / "recipe.yaml").write_text("model: tiny\ntask: arithmetic\n")
    assert any("warm start 1 of 3" in line for line in screen(tmp_path))


def test_in_a_pipe_each_tenth_is_a_line(tmp_path, capsys):
    clock, tenth = Clock(), -1
    file = WarmStartFile(tmp_path, clock)
    with closing(RunWatcher(tmp_path)) as watcher:
        for step in range(0, 101, 4):
            clock.now += 1
            file.write(step, 100, 1.0)
            tenth = _print_warm_start(watcher.take_snapshot(), tenth)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11
    assert lines[-1].startswith("warm start 100 of 100 | loss 1")


def test_a_link_in_its_place_is_replaced_and_not_followed(tmp_path):
    other = tmp_path / "other"
    other.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / FILE).symlink_to(other)
    WarmStartFile(run).write(1, 2, 1.0)
    assert other.read_text() == "mine"
    assert not (run / FILE).is_symlink()
