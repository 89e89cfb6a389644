from types import SimpleNamespace

import pytest
from bench.harness import CONTROL, Claim, interval, measure

from bench import harness


class Machine:
    """A clock that arms move, on a machine that grows slower with every arm it has run."""

    def __init__(self, *, slower: float = 0.0, hiccups: tuple[float, ...] = (1.0,)) -> None:
        self.now, self._slower, self._hiccups, self._runs = 0.0, slower, hiccups, 0
        self.order: list[str] = []

    def arm(self, name: str, seconds: float):
        def run() -> None:
            self.order.append(name)
            hiccup = self._hiccups[self._runs % len(self._hiccups)]
            self.now += seconds * hiccup * (1 + self._slower * self._runs)
            self._runs += 1

        return run

    def perf_counter(self) -> float:
        return self.now

    process_time = monotonic = perf_counter


@pytest.fixture
def on(monkeypatch):
    def machine(**how) -> Machine:
        made = Machine(**how)
        monkeypatch.setattr(harness, "time", made)
        # with all that a test process holds, a collection takes longer than the rest
        monkeypatch.setattr(
            harness, "gc", SimpleNamespace(collect=lambda: None, freeze=lambda: None)
        )
        return made

    return machine


def claim(must: float, **how) -> Claim:
    return Claim(name="b / a", arm="b", over="a", must=must, **how)


def told(machine: Machine, wanted: Claim, *, b: float = 1.2, **how):
    arms = {"a": machine.arm("a", 1.0), "b": machine.arm("b", b)}
    return measure(arms, [wanted], **how)["ratios"]["b / a"]


def test_arms_run_forwards_and_backwards_with_the_control_inside(on):
    machine = on()
    told(machine, claim(1.3), least=2)
    warm, rounds = machine.order[:3], machine.order[3:]
    assert warm == ["a", "b", "a"]
    assert rounds == 2 * ["a", "b", "a", "a", "b", "a"]


def test_a_machine_that_grows_slower_changes_no_ratio(on):
    found = told(on(slower=0.05), claim(1.3))
    assert found["median"] == pytest.approx(1.2, rel=1e-3)
    assert found["aa"] == pytest.approx(1.0, rel=1e-3)
    assert found["ok"]


@pytest.mark.parametrize(
    ("must", "side", "ok"),
    [
        (1.3, "at most", True),
        (1.1, "at most", False),
        (1.1, "at least", True),
        (1.3, "at least", False),
        (1.3, "below", True),
        (1.1, "below", False),
    ],
)
def test_a_claim_holds_on_its_side(on, must, side, ok):
    assert told(on(), claim(must, side=side))["ok"] is ok


def test_a_ratio_of_speeds_is_that_of_times_upside_down(on):
    found = told(on(), claim(0.7, side="at least", inverted=True))
    assert found["median"] == pytest.approx(1 / 1.2)


def test_where_the_control_is_wider_than_a_third_of_the_margin_nothing_is_shown(on):
    noise = (1.0, 1.0, 1.3, 1.0, 0.8, 1.0, 1.0, 1.1, 0.7)
    found = told(on(hiccups=noise), claim(1.35), most=9, seconds=1e9)
    width = found["aa_high"] - found["aa_low"]
    assert width > (1.35 - found["median"]) / 3
    assert not found["quiet"]
    assert not found["ok"]
    assert found["rounds"] == 9


def test_rounds_end_when_the_control_is_narrow_or_time_is_up(on):
    assert told(on(), claim(1.3), least=5)["rounds"] == 5
    noisy = on(hiccups=(1.0, 1.0, 1.3, 1.0, 0.8, 1.0, 1.0, 1.1, 0.7))
    assert told(noisy, claim(1.2), seconds=10.0)["rounds"] == 3


def test_the_control_is_the_first_arm_again(on):
    machine = on()
    arms = {"a": machine.arm("a", 2.0), "b": machine.arm("b", 1.0)}
    found = measure(arms, [claim(0.6)], least=3)
    assert found["wall"][CONTROL] == found["wall"]["a"] == 3 * [4.0]


def test_an_interval_holds_its_median_and_is_the_same_twice():
    values = [1.0, 1.1, 0.9, 1.3, 1.05, 0.95, 1.0]
    found = interval(values)
    assert found.median == 1.0
    assert 0.9 <= found.low <= found.median <= found.high <= 1.3
    assert interval(values) == found
