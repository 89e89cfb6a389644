"""Somebody is killed; what it left behind is gone soon after."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from klinic.runtime.cleanup_process import GRACE_SECONDS
from klinic.runtime.process_tree import descendant_pids
from process_asserts import wait_until_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux names processes for ever")
SCRIPT = """
import subprocess, sys, time
from pathlib import Path
from klinic.runtime.cleanup_process import start_cleanup_process

left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
folder = Path(sys.argv[1])
(folder / "deep").mkdir(parents=True)
start_cleanup_process(folders=[folder], pids=[left.pid])
print(left.pid, flush=True)
{then}
"""


def start(folder, then):
    script = [sys.executable, "-c", SCRIPT.replace("{then}", then), str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(script, text=True, **pipes)


def ignores(pid, number):
    (line,) = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigIgn")
    ]
    return int(line.split()[1], 16) >> (number - 1) & 1


def test_what_a_killed_process_leaves_is_taken_away(tmp_path):
    with start(tmp_path / "left", "time.sleep(100)") as process:
        left = int(process.stdout.readline())
        there = descendant_pids(process.pid)
        assert left in there
        assert len(there) == 2
        os.kill(process.pid, signal.SIGKILL)
        wait_until_gone(there, seconds=5)
    assert not (tmp_path / "left").exists()


def test_being_asked_to_end_with_everybody_else_does_not_stop_it(tmp_path):
    with start(tmp_path / "left", "time.sleep(100)") as process:
        left = int(process.stdout.readline())
        (undertaker,) = descendant_pids(process.pid) - {left}
        while not ignores(undertaker, signal.SIGHUP):  # it has only just been started
            time.sleep(0.01)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(undertaker, number)
        process.kill()
        wait_until_gone([left, undertaker], seconds=5)
    assert not (tmp_path / "left").exists()


def test_whoever_ends_in_order_is_not_waited_for(tmp_path):
    in_order = "sys.stdin.readline(); left.kill(); left.wait(); folder.rmdir()"
    with start(tmp_path / "left", in_order) as process:
        left = int(process.stdout.readline())
        there = descendant_pids(process.pid)
        (undertaker,) = there - {left}
        while not ignores(undertaker, signal.SIGHUP):  # it has only just been started
            time.sleep(0.01)
        process.communicate("go\n", timeout=10)
    begun = time.monotonic()
    wait_until_gone(there)
    assert time.monotonic() - begun < GRACE_SECONDS
