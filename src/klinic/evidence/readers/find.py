"""Detects the log format of a path and reads it.

Of several logs in a folder the most detailed is read; the others are listed in `ScalarLog.also`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from klinic.errors import EvidenceError
from klinic.evidence.files import open_file
from klinic.evidence.readers import json_lines, tensorboard, trainer_state, verl_rollouts, wandb
from klinic.evidence.readers.log import ScalarLog
from klinic.evidence.readers.trainer_state import list_folder

METRICS = "metrics.jsonl"  # as in run_facts.py, which imports NumPy
JSON_LINES = (".jsonl", ".ndjson")
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".joblib")
PICKLE_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
MAX_ENTRIES = 10_000  # entries of a folder that are inspected


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """A readable log, and the function that reads it."""

    label: str
    read: Callable[[], ScalarLog]


def read_log(path: Path) -> ScalarLog:
    """Return the scalar log at a path; raise `EvidenceError` if there is none."""
    sources = list(logs_in_folder(path)) if path.is_dir() else [log_of_file(path)]
    if not sources:
        raise EvidenceError(_no_log_message(path))
    return replace(sources[0].read(), also=tuple(other.label for other in sources[1:]))


def has_records(run: Path) -> bool:
    """Whether a folder has token-level records of klinic's format."""
    return any((run / "records").glob("step=*/complete.json"))


def logs_in_folder(folder: Path) -> Iterator[LogSource]:
    """Yield the logs of a folder, the most detailed first."""
    if state := trainer_state.find_state_file(folder):
        yield LogSource(label=str(state), read=lambda: trainer_state.read_log(state))
    inside = list_folder(folder)[:MAX_ENTRIES]
    rollouts = verl_rollouts.find_rollouts(folder)
    lines = [p for p in inside if p.suffix in JSON_LINES and p.is_file() and p not in rollouts]
    if metrics := _metrics_file(lines):
        yield LogSource(label=str(metrics), read=lambda: json_lines.read_log(metrics))
    if runs := _wandb_runs(folder):
        newest = runs[-1]
        yield LogSource(label=str(newest), read=lambda: wandb.read_log(newest))
    if events := _event_files(folder):
        yield LogSource(label=str(events[0]), read=lambda: tensorboard.read_log(events))
    if rollouts:
        yield LogSource(label=str(rollouts[0]), read=lambda: verl_rollouts.read_log(rollouts))


def log_of_file(path: Path) -> LogSource:
    """Return the log of a file, detected by its name, then by its first bytes."""
    refuse_pickle(path)
    if tensorboard.is_events(path):
        return LogSource(label=str(path), read=lambda: tensorboard.read_log((path,)))
    begins = _first_bytes(path)
    if path.suffix == wandb.SUFFIX or begins.startswith(wandb.MAGIC[:4]):
        return LogSource(label=str(path), read=lambda: wandb.read_log(path))
    if path.suffix == ".json":
        return LogSource(label=str(path), read=lambda: trainer_state.read_log(path))
    if path.suffix in JSON_LINES or begins.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        if verl_rollouts.is_rollouts(path):
            return LogSource(label=str(path), read=lambda: verl_rollouts.read_log((path,)))
        return LogSource(label=str(path), read=lambda: json_lines.read_log(path))
    raise EvidenceError(
        f"{path}: is not a log that klinic reads. Pass a run of klinic, a trainer_state.json, JSON "
        "lines, an event file of TensorBoard, or a .wandb file; or a folder with one of them."
    )


def refuse_pickle(path: Path) -> None:
    """Raise `EvidenceError` for a pickle: unpickling would execute code in it."""
    if path.suffix in PICKLES or _first_bytes(path).startswith(PICKLE_STARTS):
        raise EvidenceError(
            f"{path}: is a pickle or an archive of one, and reading it would execute any code in "
            "it. Convert it where it was made: json.dump the result of `torch.load`, one "
            "object per step, or write the evidence as docs/how-to/write-evidence.md shows."
        )


def _first_bytes(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(64)


def _metrics_file(lines: list[Path]) -> Path | None:
    """Return metrics.jsonl, or the only JSON-lines file."""
    named = [path for path in lines if path.name == METRICS]
    return named[0] if named else lines[0] if len(lines) == 1 else None


def _wandb_runs(folder: Path) -> list[Path]:
    """Return the .wandb files in the folder, in `wandb/` and in their `run-` folders."""
    folders = [folder, *(p for p in list_folder(folder)[:MAX_ENTRIES] if "run-" in p.name)]
    if (folder / "wandb").is_dir():
        folders += [p for p in list_folder(folder / "wandb")[:MAX_ENTRIES] if "run-" in p.name]
    candidates = [
        p for run_folder in folders for p in list_folder(run_folder) if p.suffix == wandb.SUFFIX
    ]
    return sorted((p for p in candidates if p.is_file()), key=lambda path: path.parent.name)


def _event_files(folder: Path) -> tuple[Path, ...]:
    """Return the event files of the folder, or of its newest subfolder or that of `runs`."""
    here = [
        p for p in list_folder(folder)[:MAX_ENTRIES] if tensorboard.is_events(p) and p.is_file()
    ]
    if here:
        return tensorboard.sort_by_time(here)
    below = [p for p in list_folder(folder / "runs") + list_folder(folder) if p.is_dir()]
    for subfolder in reversed(below[:MAX_ENTRIES]):
        event_paths = [
            p for p in list_folder(subfolder) if tensorboard.is_events(p) and p.is_file()
        ]
        if event_paths:
            return tensorboard.sort_by_time(event_paths)
    return ()


def _no_log_message(folder: Path) -> str:
    names = [child.name for child in list_folder(folder)[:MAX_ENTRIES]]
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        return (
            f"{folder}: has {pickles[0]}, a pickle, and nothing that klinic reads: unpickling "
            "would execute any code in it. Save the log as JSON lines where it was made, or write "
            "the evidence as docs/how-to/write-evidence.md shows."
        )
    return (
        f"{folder} has no records, so there is nothing to diagnose. Pass the folder of a run: "
        "klinic's has `records/step=...` (output.records_every: 1); of others it reads "
        "trainer_state.json, JSON lines, event files of TensorBoard, .wandb files, verl's rollouts "
        "and prime-rl's token_exports."
    )
