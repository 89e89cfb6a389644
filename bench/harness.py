"""How ratios are measured: all sides in one process, interleaved, beside a control.

A round runs every arm forwards and then backwards, A B C A' A' C B A, so that a machine which grows
slower from minute to minute slows all arms alike. A' is A again under another name: what its ratio
is away from 1 is what the machine does to a ratio of 1. Rounds go on until the interval of the
control is narrower than a third of the margin that is claimed; a ratio whose rounds run out before
that is not shown, whatever it is.
"""

import gc
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

CONTROL = "A/A"
RESAMPLES = 2000
Side = Literal["at most", "at least", "below"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """That the time of one arm is at most, or at least, so many times that of another."""

    name: str
    arm: str
    over: str
    must: float
    side: Side = "at most"
    inverted: bool = False
    """Whether it is a ratio of speeds: the other arm's time over this one's."""

    def holds(self, interval: "Interval") -> bool:
        """Whether a measured ratio keeps it."""
        match self.side:
            case "at most":
                return interval.median <= self.must
            case "at least":
                return interval.median >= self.must
            case "below":
                return interval.high < self.must


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and where it would lie in 95% of such measurements."""

    median: float
    low: float
    high: float


@dataclass(slots=True, kw_only=True)
class Rounds:
    """The seconds of every arm, two to a round: forwards and backwards."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    @property
    def num(self) -> int:
        """How many rounds there are."""
        return min((len(times) for times in self.wall.values()), default=0)

    def ratio(self, arm: str, over: str, *, cpu: bool = False) -> Interval:
        """Return the time of one arm over that of another, from the ratios of the rounds."""
        of = self.cpu if cpu else self.wall
        return interval([a / b for a, b in zip(of[arm], of[over], strict=True)])


def interval(values: Sequence[float]) -> Interval:
    """Return the median and its bootstrap interval; the same values give the same interval."""
    stream = random.Random(0)  # noqa: S311 - resampling, not secrets
    medians = sorted(
        statistics.median(stream.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    cut = RESAMPLES // 40
    return Interval(statistics.median(values), medians[cut], medians[-1 - cut])


def measure(
    arms: Mapping[str, Callable[[], Any]],
    claims: Sequence[Claim],
    *,
    least: int = 7,
    most: int = 500,
    seconds: float = 600.0,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return what the claims' ratios came out as, with the seconds they were made from."""
    every = {**arms, CONTROL: next(iter(arms.values()))}
    for arm in every.values():
        arm()  # the first time loads, compiles and allocates
    gc.collect()
    gc.freeze()  # what is there now stays, and need not be looked through before every arm
    rounds, began = Rounds(), time.monotonic()
    while rounds.num < most:
        _one_round(every, rounds)
        found = {claim.name: _found(claim, rounds, next(iter(arms))) for claim in claims}
        tell(
            f"round {rounds.num}: " + ", ".join(f"{k} {v['median']:.3f}" for k, v in found.items())
        )
        settled = rounds.num >= least and all(f["quiet"] for f in found.values())
        if settled or (rounds.num >= 3 and time.monotonic() - began > seconds):
            break
    return {"ratios": found, "wall": rounds.wall, "cpu": rounds.cpu, "rounds": rounds.num}


def _one_round(arms: Mapping[str, Callable[[], Any]], rounds: Rounds) -> None:
    wall, cpu = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0.0)
    for name in (*arms, *reversed(list(arms))):
        gc.collect()
        began = time.perf_counter(), time.process_time()
        arms[name]()
        wall[name] += time.perf_counter() - began[0]
        cpu[name] += time.process_time() - began[1]
    for name in arms:
        rounds.wall.setdefault(name, []).append(wall[name])
        rounds.cpu.setdefault(name, []).append(cpu[name])


def _found(claim: Claim, rounds: Rounds, first: str) -> dict[str, Any]:
    ends = (claim.over, claim.arm) if claim.inverted else (claim.arm, claim.over)
    ratio, control = rounds.ratio(*ends), rounds.ratio(CONTROL, first)
    margin = abs(claim.must - ratio.median)
    quiet = control.high - control.low < margin / 3
    return {
        **asdict(ratio),
        "must": claim.must,
        "side": claim.side,
        "ok": claim.holds(ratio) and quiet,
        "quiet": quiet,
        "aa": control.median,
        "aa_low": control.low,
        "aa_high": control.high,
        "cpu": rounds.ratio(*ends, cpu=True).median,
        "rounds": rounds.num,
        "seconds": statistics.median(rounds.wall[claim.over]) / 2,
    }


def versions() -> dict[str, str]:
    """Return what the figures are of."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("torch", "transformers", "trl", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found
