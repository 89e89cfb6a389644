"""Runs whose samplers and learners are Ray's processes, also when some of them are killed."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from killing import command, differences, environment, num_steps, run_whole

from listening import listening

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
SAMPLER = "ray::SamplerWorker"


def tree(pid):
    """Return a process and all below it."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        below = [int(c) for t in tasks for c in (t / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(found for child in below for found in tree(child))]


def named(pid, title):
    """Return the processes below one that Ray gave a title."""
    found = []
    for one in tree(pid):
        try:
            line = Path(f"/proc/{one}/cmdline").read_text()
        except OSError:
            continue
        if line.startswith(title):
            found.append(one)
    return found


def until(holds, seconds=120.0):
    """Wait until something holds; return whether it came to."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return False


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class Started:
    """`klinic train` with a cluster, under way."""

    def __init__(self, folder, cache, *more):
        self.run = folder / "run"
        self.out = (folder / "out.txt").open("w")
        self.process = subprocess.Popen(
            command(folder, *more), env=environment(cache), stdout=self.out, stderr=self.out
        )

    def reaches(self, step):
        assert until(lambda: num_steps(self.run) >= step or self.process.poll() is not None)
        assert self.process.poll() is None, self.said()

    def said(self):
        return (self.run.parent / "out.txt").read_text()

    def ends(self, seconds=240.0):
        try:
            self.process.wait(seconds)
        finally:
            self.process.kill()
            self.out.close()
        assert self.process.returncode == 0, self.said()


def events(run):
    path = run / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("alone")
    run_whole(folder, cache)
    return folder / "run"


def start(tmp_path, alone, cache, *more):
    (tmp_path / "recipe.yaml").write_text((alone.parent / "recipe.yaml").read_text())
    return Started(tmp_path, cache, *more)


def test_a_run_with_a_killed_sampler_is_the_run_of_one_process_to_the_last_bit(
    tmp_path, alone, cache
):
    started = start(tmp_path, alone, cache, "cluster.samplers=1")
    started.reaches(3)
    addresses = listening(started.process.pid)
    everybody = tree(started.process.pid)
    (sampler,) = named(started.process.pid, SAMPLER)
    os.kill(sampler, signal.SIGKILL)
    started.ends()
    assert differences(alone, started.run) == []
    assert [e["says"] for e in events(started.run) if e["event"] == "cluster"]
    assert addresses
    assert all(address.is_loopback for address in addresses)
    assert until(lambda: not any(alive(pid) for pid in everybody), 15.0)


@pytest.mark.slow
def test_a_sampler_that_hangs_is_replaced(tmp_path, alone, cache):
    started = start(tmp_path, alone, cache, "cluster.samplers=1")
    started.reaches(3)
    (sampler,) = named(started.process.pid, SAMPLER)
    os.kill(sampler, signal.SIGSTOP)
    started.ends()
    assert differences(alone, started.run) == []
    assert "silent" in events(started.run)[-1]["says"]
    assert not alive(sampler)
