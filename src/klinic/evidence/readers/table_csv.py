"""Reads CSV tables of metrics: W&B exports, MLflow exports, and any table with a column of steps.

Cells are separated by commas, tabs or semicolons.

    wide      a row per step, a column per metric: `run.history().to_csv`, and most other tools
    W&B chart a row per step, columns `RUN - METRIC`, `RUN - METRIC__MIN` and `RUN - METRIC__MAX`
    long      a row per value: `run_id,key,value,step,timestamp`, as MLflow's page downloads it

A folder of W&B charts, one file per metric, is read as one log; of tables of several runs, one.
Source of the long form: mlflow ac9005c2d5, MetricsPlotPanel.tsx:64.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from klinic.errors import EvidenceError
from klinic.evidence.files import read_bytes
from klinic.evidence.readers.json_lines import STEP_NAMES
from klinic.evidence.readers.log import COUNTERS, LogBuilder, ScalarLog, parse_number
from klinic.evidence.readers.trainer_state import is_training_entry

SUFFIXES = (".csv", ".tsv")
SEPARATORS = (",", "\t", ";")
LONGEST_HEADER = 1 << 20  # characters
LARGEST = 1 << 28  # bytes
MOST_COLUMNS = 10_000
STEP_COLUMNS = (
    *(*STEP_NAMES, "Step", "Global Step", "global step"),
    *("Iteration", "Iter", "iters", "Update", "updates"),
)
COUNTER_COLUMNS = frozenset((*STEP_COLUMNS, *COUNTERS, "", "Relative Time (Wall)"))
LONG_COLUMNS = {"key", "value", "step"}
CHART_SEPARATOR = " - "
CHART_BOUNDS = ("__MIN", "__MAX")  # of the values that a chart point averages

Entry = dict[str, str | int | float | None]


def read_log(paths: Sequence[Path]) -> ScalarLog:
    """Return the metrics of one CSV file, or of several charts of one run."""
    builder = LogBuilder()
    runs: set[str] = set()
    for path in paths:
        for entry in _read_entries(path, runs):
            if is_training_entry(entry):
                step = next((entry[name] for name in STEP_COLUMNS if name in entry), None)
                builder.add(step, entry)
    if len(runs) > 1:
        names = ", ".join(sorted(runs)[:4])
        raise EvidenceError(
            f"{paths[0]}: has the metrics of {len(runs)} runs ({names}), and a diagnosis is of "
            "one. Export one run, or delete the columns or rows of the others."
        )
    return builder.build_log(format="CSV", files=tuple(paths))


def split_runs(paths: Sequence[Path]) -> list[tuple[Path, ...]]:
    """Return the tables of each run, the newest first.

    Tables with a metric in common are not the charts of one run.
    """
    if len(paths) > 1 and _have_common_metric(paths):
        newest_first = sorted(paths, key=lambda p: (p.stat().st_mtime, p.name), reverse=True)
        return [(path,) for path in newest_first]
    return [tuple(paths)] if paths else []


def _have_common_metric(paths: Sequence[Path]) -> bool:
    used_names: set[str] = set()
    for path in paths:
        header = next(_read_rows(path), [])
        names = {"key"} if LONG_COLUMNS.issubset(header) else set(header) - COUNTER_COLUMNS
        if names & used_names:
            return True
        used_names |= names
    return False


def _read_entries(path: Path, runs: set[str]) -> Iterator[Entry]:
    rows = _read_rows(path)
    header = next(rows, [])
    if LONG_COLUMNS.issubset(header):
        yield from _long_entries(header, rows, runs)
        return
    names = _column_names(header, runs)
    steps = frozenset(names).intersection(STEP_COLUMNS)
    for row in rows:
        # texts of numbers: the log converts the columns that it reads
        yield {
            name: _parse_step(cell) if name in steps else cell
            for name, cell in zip(names, row, strict=False)
            if name and cell
        }


def _read_rows(path: Path) -> Iterator[list[str]]:
    try:
        text = read_bytes(path, largest=LARGEST).decode("utf-8-sig")
        separator = _separator(text[:LONGEST_HEADER].partition("\n")[0])
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator):
            if len(row) > MOST_COLUMNS:
                raise csv.Error(f"a row has more than {MOST_COLUMNS:,} columns")
            yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise EvidenceError(
            f"{path}: is not CSV ({error}). It was cut short or edited; export it again."
        ) from error


def _separator(header: str) -> str:
    """Return what separates the cells of a table: a comma, a tab or a semicolon.

    >>> _separator("step\\tkl\\treward")
    '\\t'
    """
    return max(SEPARATORS, key=header.count)


def _column_names(header: Sequence[str], runs: set[str]) -> list[str]:
    """Return the metric of each column, "" for one that is not read; adds the runs of a chart."""
    names = []
    for title in header:
        run, separator, metric = title.rpartition(CHART_SEPARATOR)
        if not separator:
            names.append(title.strip())
        elif metric.endswith(CHART_BOUNDS):
            names.append("")
        else:
            runs.add(run)
            names.append("" if metric in STEP_COLUMNS else metric.strip())
    return names


def _long_entries(
    header: Sequence[str], rows: Iterator[list[str]], runs: set[str]
) -> Iterator[Entry]:
    for row in rows:
        cells = dict(zip(header, row, strict=False))
        if cells.get("key"):
            runs.update(filter(None, [cells.get("run_id")]))
            yield {"step": _parse_step(cells.get("step")), cells["key"]: cells.get("value", "")}


def _parse_step(cell: str | None) -> int | float | None:
    """Return the step in a cell; None if it is not a number."""
    if cell is not None and cell.isdecimal() and len(cell) < 16:
        return int(cell)
    return parse_number("" if cell is None else cell)
