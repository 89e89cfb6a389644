"""One run of the race, and what stands in a race's folder."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from klinic.evidence.files import Journal

TRAINERS = ("klinic", "trl")
RESULTS = "results.jsonl"
START = "start"
BEFORE = "start.json"
LOGS = "logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Which trainer, from which seed, tied how strongly, for how long."""

    trainer: str
    seed: int
    coef: float
    steps: int

    @property
    def name(self) -> str:
        """The run in the name of a file."""
        return f"{self.trainer}-seed{self.seed}-coef{self.coef:g}-steps{self.steps}"


def entries(*, seeds: int, coefs: Sequence[float], steps: int) -> Iterator[Entry]:
    """Yield all runs of a race, the trainers in turn, so that an early end leaves whole pairs.

    >>> [entry.name for entry in entries(seeds=1, coefs=[0.0], steps=9)]
    ['klinic-seed1-coef0-steps9', 'trl-seed1-coef0-steps9']
    """
    for seed in range(1, seeds + 1):
        for coef in coefs:
            for trainer in TRAINERS:
                yield Entry(trainer=trainer, seed=seed, coef=coef, steps=steps)


def results(folder: Path) -> list[dict[str, Any]]:
    """Return what is done."""
    return list(Journal(folder / RESULTS).entries())


def is_done(entry: Entry, done: Sequence[dict[str, Any]]) -> bool:
    """Whether a run has its result."""
    wanted = asdict(entry)
    return any(all(result[key] == value for key, value in wanted.items()) for result in done)
