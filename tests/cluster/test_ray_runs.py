"""Runs whose samplers and learners are Ray's processes, also when some of them are killed."""

import os
import signal
import sys
import time

import pytest
from killing import differences, num_steps, process_of, run_whole
from started import LEARNER, RAYLET, SAMPLER, Started

from open_ports import listening
from process_asserts import is_gone, wait_until_gone

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
LONGER = ("loop.max_steps=80", "loop.eval_every=0", "output.doctor=none")
EVERY = 2  # steps between checkpoints in the recipe of `killing`


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache):
    """A run of one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("alone")
    run_whole(folder, cache)
    return folder / "run"


@pytest.fixture(scope="module")
def long(tmp_path_factory, alone, cache):
    """A longer run of one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "recipe.yaml").write_text((alone.parent / "recipe.yaml").read_text())
    run_whole(folder, cache, *LONGER)
    return folder / "run"


@pytest.fixture(scope="module")
def two_learners(tmp_path_factory, alone, cache):
    """A run with two learners that nobody disturbs."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "recipe.yaml").write_text((alone.parent / "recipe.yaml").read_text())
    run_whole(folder, cache, "learner.shards=2")
    return folder / "run"


def start(tmp_path, alone, cache, *more, supervised=False):
    (tmp_path / "recipe.yaml").write_text((alone.parent / "recipe.yaml").read_text())
    return Started(tmp_path, cache, *more, supervised=supervised)


def test_a_run_with_a_killed_sampler_is_the_run_of_one_process_to_the_last_bit(
    tmp_path, alone, cache
):
    started = start(tmp_path, alone, cache, "cluster.samplers=1")
    started.reaches(3)
    addresses = listening(started.process.pid)
    everybody = started.everybody()
    (sampler,) = started.named(SAMPLER)
    os.kill(sampler, signal.SIGKILL)
    started.ends()
    assert differences(alone, started.run) == []
    says = [event["says"] for event in started.events() if event["event"] == "cluster"]
    assert len(says) == 1
    assert says[0].startswith("Lost sampler 1 of 1: its process has ended")
    assert addresses
    assert all(address.is_loopback for address in addresses)
    wait_until_gone(everybody)


def disturbed(started, pid, number):
    """Send somebody a signal; print how long it takes until the run goes on."""
    before, at = num_steps(started.run), time.monotonic()
    os.kill(pid, number)
    again = started.reaches(before + 2) - at
    sys.stdout.write(f"\n{started.run.parent.name}: two more steps after {again:.1f} s\n")


@pytest.mark.slow
def test_a_sampler_that_hangs_is_replaced(tmp_path, alone, cache):
    started = start(tmp_path, alone, cache, "cluster.samplers=1")
    started.reaches(3)
    (sampler,) = started.named(SAMPLER)
    disturbed(started, sampler, signal.SIGSTOP)
    started.ends()
    assert differences(alone, started.run) == []
    assert any("silent" in event.get("says", "") for event in started.events())
    assert is_gone(sampler)


@pytest.mark.slow
def test_the_first_process_is_killed_and_the_run_goes_on(tmp_path, alone, cache):
    started = start(tmp_path, alone, cache, "cluster.samplers=1", supervised=True)
    started.reaches(3)
    before = started.everybody() - {started.process.pid}
    disturbed(started, process_of(started.run), signal.SIGKILL)
    assert all(is_gone(one) for one in before)
    started.ends()
    assert differences(alone, started.run) == []
    (restart,) = [event for event in started.events() if event["event"] == "restarted"]
    (resumed,) = [event for event in started.events() if event["event"] == "resumed"]
    assert restart["step"] - resumed["step"] <= EVERY


@pytest.mark.slow
def test_rays_own_process_is_killed_and_the_run_goes_on(tmp_path, long, cache):
    """It may take a while until anybody needs it, so the run is longer."""
    started = start(tmp_path, long, cache, *LONGER, "cluster.samplers=1", supervised=True)
    started.reaches(3)
    before = started.everybody() - {started.process.pid}
    disturbed(started, started.named(RAYLET)[0], signal.SIGKILL)
    started.ends()
    assert differences(long, started.run) == []
    wait_until_gone(before)
    sys.stdout.write(f"{[event.get('says') for event in started.events()]}\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_learner_is_lost_and_the_run_goes_on(tmp_path, two_learners, cache, number):
    more = ("cluster.samplers=1", "cluster.learners=2")
    started = start(tmp_path, two_learners, cache, *more, supervised=True)
    started.reaches(3)
    (learner,) = started.named(LEARNER)
    disturbed(started, learner, number)
    started.ends()
    assert differences(two_learners, started.run) == []


@pytest.mark.slow
def test_nobody_outlives_a_supervisor_that_is_killed(tmp_path, alone, cache):
    started = start(tmp_path, alone, cache, "cluster.samplers=2", supervised=True)
    started.reaches(2)
    everybody = started.everybody()
    started.process.kill()
    at = time.monotonic()
    wait_until_gone(everybody, seconds=15)
    sys.stdout.write(f"\nall {len(everybody)} gone after {time.monotonic() - at:.1f} s\n")
