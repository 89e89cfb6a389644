"""Reads the metrics of an MLflow run in its file store: RUN/metrics/NAME.

A line is `TIMESTAMP VALUE STEP`; names may have slashes, which are folders.
Source: mlflow ac9005c2d5, mlflow/store/tracking/file_store.py:900.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from klinic.errors import EvidenceError
from klinic.evidence.files import LONGEST_ENTRY, numbered_lines
from klinic.evidence.readers.log import LogBuilder, ScalarLog, parse_number
from klinic.evidence.readers.trainer_state import list_folder

METRICS, META = "metrics", "meta.yaml"
MOST_FILES = 2_000
STORE = "mlruns"


def find_run(folder: Path) -> Path | None:
    """Return the run in a folder: itself, or the newest of a store `mlruns`; None without one."""
    candidates = [folder, *_runs_of_store(folder), *_runs_of_store(folder / STORE)]
    runs = [run for run in candidates if (run / METRICS).is_dir() and (run / META).is_file()]
    return max(runs, key=lambda run: (run / META).stat().st_mtime, default=None)


def _runs_of_store(store: Path) -> Iterator[Path]:
    for experiment in list_folder(store):
        if (experiment / META).is_file():
            yield from list_folder(experiment)


def read_log(run: Path) -> ScalarLog:
    """Return the metrics of a run."""
    builder = LogBuilder()
    for name, path in _metric_files(run / METRICS):
        for number, line in numbered_lines(path, longest=LONGEST_ENTRY):
            fields = line.decode(errors="replace").split()
            value = parse_number(fields[1]) if len(fields) in (2, 3, 5) else None
            if value is None:
                raise EvidenceError(
                    f"{path}, line {number}: is not `TIMESTAMP VALUE STEP`. The file was damaged "
                    "after it was written; restore it from a copy or delete the line."
                )
            step = fields[2] if len(fields) > 2 else "0"
            builder.add(int(step) if step.isdecimal() and len(step) < 16 else None, {name: value})
    return builder.build_log(format="MLflow run", files=(run,))


def _metric_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the metrics, without following links to folders."""
    for num, path in enumerate(_walk_files(folder)):
        if num < MOST_FILES:
            yield path.relative_to(folder).as_posix(), path


def _walk_files(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders.sort()
        yield from (Path(root, name) for name in sorted(files))
