import threading
import time

import pytest
from bench.in_step_timing import Inside, share

from bench import in_step_timing


@pytest.fixture
def clock(monkeypatch):
    class Now:
        seconds = 0.0

        def perf_counter(self) -> float:
            return self.seconds

        process_time = perf_counter

        def thread_time(self) -> float:
            return self.seconds - self.waited

        waited = 0.0

        pthread_getcpuclockid = staticmethod(time.pthread_getcpuclockid)

        def clock_gettime(self, _: int) -> float:
            return self.seconds - self.by_others

        by_others = 0.0

    now = Now()
    monkeypatch.setattr(in_step_timing, "time", now)
    return now


def passing(now, seconds):
    def work() -> None:
        now.seconds += seconds

    return work


def test_only_what_is_added_counts(clock):
    timer = Inside()
    before = timer.there_before(passing(clock, 10.0))

    def around() -> None:
        clock.seconds += 1.0
        before()
        clock.seconds += 2.0

    timer.added(around)()
    passing(clock, 100.0)()
    assert timer.seconds == 3.0


def test_what_is_added_inside_of_what_was_there_counts_once(clock):
    timer = Inside()
    listening = timer.added(passing(clock, 0.5))

    def generating() -> None:
        clock.seconds += 4.0
        listening()

    timer.added(timer.there_before(generating))()
    assert timer.seconds == 0.5


def test_a_step_that_throws_stops_the_clock(clock):
    timer = Inside()

    def broken() -> None:
        clock.seconds += 1.0
        raise KeyError

    with pytest.raises(KeyError):
        timer.added(broken)()
    passing(clock, 5.0)()
    timer.added(passing(clock, 1.0))()
    assert timer.seconds == 2.0


def test_the_share_counts_functions_and_threads(clock):
    timer = Inside()
    added = timer.added(passing(clock, 0.01))

    def step() -> None:
        clock.seconds += 1.0
        added()
        clock.by_others += 0.03

    found, raw = share(step, timer, threading.main_thread(), must=1.01)
    assert found["median"] == pytest.approx(1.04)
    assert not found["ok"]
    assert raw["added"] == pytest.approx(len(raw["step"]) * [0.01])
    assert share(step, timer, threading.main_thread(), must=None)[0]["ok"]


def test_processor_time_leaves_out_waits(clock):
    timer = Inside(has_processor_time=True)

    def waiting() -> None:
        clock.seconds += 1.0
        clock.waited += 0.75

    timer.added(waiting)()
    assert timer.seconds == 0.25


def test_the_share_of_processor_time_is_that_of_the_threads_own(clock):
    timer = Inside(has_processor_time=True)
    added = timer.added(passing(clock, 0.01))

    def step() -> None:
        clock.seconds += 1.0  # half of it waits
        clock.by_others += 0.5
        clock.waited += 0.5
        added()

    found, raw = share(step, timer, threading.main_thread(), must=None)
    assert raw["step"] == pytest.approx(len(raw["step"]) * [0.51])
    assert found["median"] == pytest.approx(1 + (0.01 + 0.5) / 0.5)
