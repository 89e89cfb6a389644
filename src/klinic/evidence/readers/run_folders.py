"""Folders that hold runs: the run that is read, and the names of the others."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from klinic.errors import EvidenceError
from klinic.evidence.readers.dumps.find import find_dumps
from klinic.evidence.readers.dumps.torch_files import advise_convert
from klinic.evidence.readers.find import MAX_ENTRIES, has_records, logs_in_folder
from klinic.evidence.readers.log import ScalarLog
from klinic.evidence.readers.trainer_state import list_folder

LOGS = "logs"  # of NeMo-RL, with a folder per start
MOST_RUNS = 100  # folders of runs that are inspected
MOST_NAMED = 6
NUMBERED = re.compile(r"(.*?)([0-9]{1,15})")
MOST_NEIGHBOURS = 20  # folders beside a run that continues another


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """The run to read at a path, and other runs beside it."""

    path: Path
    others: tuple[Path, ...] = ()

    @property
    def notice(self) -> str:
        """Which of several runs is read; "" for a single one."""
        if not self.others:
            return ""
        names = _list_names([other.name for other in self.others])
        return f"{self.path} is the newest of {len(self.others) + 1} runs. The others: {names}"


def find_run(path: Path) -> FoundRun:
    """Return a path, or the newest run in a folder that only has folders of runs.

    ms-swift, NeMo-RL and prime-rl write a folder per start into the output folder. Of folders with
    klinic's records none is chosen: raises with their names.
    """
    if not path.is_dir() or _is_run(path):
        return FoundRun(path=path)
    refuse_several(path)
    inside = _newest_first(path)[:MOST_RUNS]
    runs = [child for child in inside if _is_run(child)]
    if runs:
        return FoundRun(path=runs[0], others=tuple(runs[1:]))
    logs = path / LOGS
    return find_run(logs) if logs in inside else FoundRun(path=path)


def refuse_several(path: Path) -> None:
    """Raise if a folder has no records of its own, but runs with records inside."""
    runs = runs_inside(path)
    if runs:
        names = _list_names([run.name for run in runs])
        what = "a run" if len(runs) == 1 else f"{len(runs)} runs"
        raise EvidenceError(f"{path}: is no run, but has {what}: {names}. Give {runs[0]}.")


def runs_inside(path: Path) -> list[Path]:
    """Return the runs with klinic's records in a folder that has none itself, the newest first."""
    if not path.is_dir() or has_records(path):
        return []
    return [child for child in _newest_first(path) if has_records(child)]


def folders_of_logs(run: Path) -> list[Path]:
    """Return the folders in that of a run which may have its log beside a dump."""
    if not run.is_dir():
        return []
    inside = [child for child in _newest_first(run) if not child.name.isdecimal()]
    return [child for child in inside if not child.is_symlink()][:MOST_NEIGHBOURS]


def _newest_first(path: Path) -> list[Path]:
    """Return the folders in a folder: by their numbers if they are numbered alike, else by time."""
    inside = [child for child in list_folder(path)[:MAX_ENTRIES] if child.is_dir()]
    matches = [NUMBERED.fullmatch(child.name) for child in inside]
    if inside and all(matches) and len({m[1] for m in matches if m}) == 1:
        numbers = {child: int(m[2]) for child, m in zip(inside, matches, strict=True) if m}
        return sorted(inside, key=numbers.__getitem__, reverse=True)
    return sorted(inside, key=lambda child: (child.stat().st_mtime, child.name), reverse=True)


def join_parts(log: ScalarLog, run: Path) -> ScalarLog:
    """Return the later of two logs of a resumed run, with the one that it continues.

    A trainer that resumes may begin a new folder; its first step follows the last one of another.
    """
    if not run.is_dir() or log.steps_are_counted:
        return log
    is_later_part = log.steps[0] > log.log_interval
    for folder in _newest_first(run.parent)[:MOST_NEIGHBOURS] if is_later_part else _next(run):
        other = None if folder == run else _read_first_log(folder)
        if other is None or other.steps_are_counted or other.trainer != log.trainer:
            continue
        if _continues(log, other):
            return replace(log, before=other)
        if _continues(other, log):
            return replace(other, before=log)
    return log


def _next(run: Path) -> list[Path]:
    """Return the folder that is numbered next to that of a run; empty without one."""
    match = NUMBERED.fullmatch(run.name)
    if match is None:
        return []
    digits = str(int(match[2]) + 1).zfill(len(match[2]))
    folder = run.parent / f"{match[1]}{digits}"
    return [folder] if folder.is_dir() else []


def _continues(later: ScalarLog, earlier: ScalarLog) -> bool:
    return 0 < later.steps[0] - earlier.steps[-1] <= max(later.log_interval, earlier.log_interval)


def _read_first_log(folder: Path) -> ScalarLog | None:
    try:
        return next((source.read() for source in logs_in_folder(folder)), None)
    except (EvidenceError, OSError):  # it is only compared with
        return None


def _is_run(folder: Path) -> bool:
    """Whether a folder has a log or a dump."""
    if find_dumps(folder) or advise_convert(folder):
        return True
    return any(True for _ in logs_in_folder(folder))


def _list_names(names: list[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
