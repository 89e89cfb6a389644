"""ScalarLog: steps and metric columns under klinic's names, from the log of any trainer."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from klinic.errors import EvidenceError
from klinic.evidence.readers.own_names import recognise_metric
from klinic.evidence.readers.recognise import recognise_trainer
from klinic.evidence.readers.trainer import Trainer

MAX_STEP = 2**53  # above it, floats skip integers
LONGEST_NUMBER = 40  # characters: some writers quote numbers

COUNTERS = frozenset(
    {
        *("step", "_step", "global_step", "training_step", "iteration", "iter", "update"),
        *("_timestamp", "_runtime", "timestamp", "time", "epoch"),
    }
)
"""Step counters and timestamps of an entry, not metrics."""

ABSENT: Any = object()

Column = tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarLog:
    """The logged metrics of a run: one value per metric and logged step."""

    format: str
    """Of the file, for people."""
    trainer: Trainer
    files: tuple[Path, ...]
    steps: tuple[int, ...]
    """The logged steps, in order."""
    columns: Mapping[str, Column]
    """By klinic's name: None where nothing was logged, NaN where NaN or null was."""
    written_as: Mapping[str, str]
    """The log's own name of each column."""
    steps_are_counted: bool = False
    """True if the log has no steps, so that its lines were numbered instead."""
    num_skipped: int = 0
    """Lines without a step in a log with steps, plus values that are not numeric."""
    also: tuple[str, ...] = ()
    """Other logs at the path, which were not read."""
    before: "ScalarLog | None" = None
    """The log of the run that this one continues, from another folder."""
    unknown: tuple[str, ...] = ()
    """Metric names that klinic does not know."""
    entries: tuple[Mapping[str, Any], ...] = field(default=(), repr=False, compare=False)
    """The logged values of each step under the log's own names."""

    @property
    def log_interval(self) -> int:
        """Median distance of logged steps; an entry is the mean over so many steps."""
        gaps = sorted(b - a for a, b in zip(self.steps, self.steps[1:], strict=False))
        return gaps[len(gaps) // 2] if gaps else max(self.steps[0], 1)

    def column(self, name: str) -> Column:
        """Return a column; all None if the log does not have it."""
        return self.columns.get(name) or (None,) * len(self.steps)

    def has_metric(self, name: str) -> bool:
        """Whether a metric was logged at least once with a value other than NaN."""
        return any(v is not None and not math.isnan(v) for v in self.columns.get(name, ()))

    def to_json(self) -> dict[str, Any]:
        """Return a summary of the log as `--json` prints it."""
        return {
            "format": self.format,
            "trainer": self.trainer.name if self.trainer.recognised else None,
            "files": [str(path) for path in self.files],
            "logged_steps": len(self.steps),
            "first_step": self.steps[0],
            "last_step": self.steps[-1],
            "every": self.log_interval,
            "metrics": dict(self.written_as),
            "unknown_metrics": list(self.unknown),
            "skipped": self.num_skipped,
            "not_read": list(self.also),
        }


class LogBuilder:
    """Collects the entries of a log; entries of the same step are merged."""

    def __init__(self) -> None:
        self._entries: dict[int, dict[str, Any]] = {}
        self._stepless: list[dict[str, Any]] = []
        self._num_skipped = 0

    def add(self, step: Any, values: Mapping[str, Any]) -> None:
        """Add the values of a step; `step` is None if the entry has none."""
        # fast path: a log has thousands
        whole = step if type(step) is int and 0 <= step <= MAX_STEP else parse_step(step)
        if whole is None:
            self._stepless.append(dict(values))
        elif whole in self._entries:
            self._entries[whole].update(values)
        else:
            self._entries[whole] = dict(values)

    def build_log(
        self,
        *,
        format: str,  # noqa: A002 - JSON's name
        files: tuple[Path, ...],
        recognise: Callable[[Iterable[str]], Trainer] = recognise_trainer,
    ) -> ScalarLog:
        """Return the log with the columns klinic knows; raise `EvidenceError` without entries."""
        steps_are_counted = not self._entries
        if steps_are_counted:
            self._entries = dict(enumerate(self._stepless, start=1))
        else:
            self._num_skipped += len(self._stepless)
        last_values: dict[str, Any] = {}
        for entry in self._entries.values():
            last_values.update(entry)
        if not last_values:
            raise EvidenceError(
                f"{files[0]}: has no entries, so there is nothing to diagnose. Pass a log with "
                "steps."
            )
        trainer = recognise(last_values)
        steps = tuple(sorted(self._entries))
        log = ScalarLog(
            format=format,
            trainer=trainer,
            files=files,
            steps=steps,
            columns={},
            written_as={},
            steps_are_counted=steps_are_counted,
            num_skipped=self._num_skipped,
            entries=tuple(self._entries[step] for step in steps),
        )
        return read_columns(log, _names_in_log(last_values, trainer), last_values)


def read_columns(
    log: ScalarLog, written_as: Mapping[str, str], last_values: Mapping[str, Any]
) -> ScalarLog:
    """Return a log with the columns of `written_as`, which maps klinic's names to the log's."""
    columns, num_skipped = dict(log.columns), log.num_skipped
    for name, key in written_as.items():
        columns[name], skipped = _read_column(log.entries, key)
        num_skipped += skipped
    for name in log.trainer.zero_is_none:
        if not any(columns.get(name, ())):
            columns.pop(name, None)
    names = {name: key for name, key in {**log.written_as, **written_as}.items() if name in columns}
    unknown = tuple(_unknown_names(last_values, log.trainer, frozenset(names.values())))
    return replace(log, columns=columns, written_as=names, num_skipped=num_skipped, unknown=unknown)


def _names_in_log(names: Iterable[str], trainer: Trainer) -> dict[str, str]:
    """Return the log's own name of each metric, by klinic's name; of several, the first."""
    last_first = tuple(names)[::-1]
    written_as = {trainer.klinic_name(name): name for name in last_first}
    if not trainer.recognised:
        usual = {recognise_metric(name): name for name in last_first}
        written_as = {**usual, **written_as}
    return {metric: name for metric, name in written_as.items() if metric is not None}


def _read_column(entries: Iterable[Mapping[str, Any]], key: str) -> tuple[Column, int]:
    """Return the values of a metric, and how many are not numeric."""
    logged = [entry.get(key, ABSENT) for entry in entries]
    if plain := _plain_numbers(logged):
        return plain, 0
    values: list[float | None] = []
    num_skipped = 0
    for value in logged:
        number = None if value is ABSENT else parse_number(value)
        num_skipped += number is None and value is not ABSENT
        values.append(number)
    return tuple(values), num_skipped


def _plain_numbers(logged: Sequence[Any]) -> tuple[float, ...]:
    """Return the values of a metric that every entry has as numbers, at once; else nothing."""
    kinds = set(map(type, logged))
    if kinds == {str}:
        if max(map(len, logged)) > LONGEST_NUMBER:
            return ()
    elif kinds != {float}:
        return ()
    try:
        return tuple(map(float, logged))
    except ValueError:
        return ()


def _unknown_names(
    last_values: Mapping[str, Any], trainer: Trainer, read: frozenset[str]
) -> Iterator[str]:
    """Yield the metric names that klinic does not know."""
    for name, value in last_values.items():
        bare = name.rpartition("/")[2]
        if (
            bare.lower().replace(" ", "_") not in COUNTERS
            and name not in read
            and trainer.klinic_name(name) is None
            and parse_number(value) is not None
        ):
            yield name


def parse_step(value: Any) -> int | None:
    """Return a step as an integer, or None if it is not one.

    >>> parse_step(3.0), parse_step("3"), parse_step(-1), parse_step(1e300), parse_step(True)
    (3, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not 0 <= value <= MAX_STEP or value != int(value):
        return None
    return int(value)


def parse_number(value: Any) -> float | None:
    """Return a logged value as a float, null as NaN; None if it is not numeric.

    >>> [parse_number(value) for value in (3, "NaN", None, "0.5", [1], 10**400)]
    [3.0, nan, nan, 0.5, None, inf]
    """
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and len(value) > LONGEST_NUMBER:
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    except ValueError:
        return None
