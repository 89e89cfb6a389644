"""Detects the log format of a path and reads it.

Of several logs in a folder the most detailed is read; the others are listed in `ScalarLog.also`.
"""

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from klinic.errors import EvidenceError
from klinic.evidence.files import open_file
from klinic.evidence.readers import (
    console_text,
    json_document,
    json_lines,
    mlflow_files,
    table_csv,
    tensorboard,
    trackio_db,
    trainer_state,
    verl_rollouts,
    wandb,
)
from klinic.evidence.readers.dumps.find import is_dump_file
from klinic.evidence.readers.dumps.torch_files import advise_convert
from klinic.evidence.readers.given_names import use_names
from klinic.evidence.readers.log import ScalarLog
from klinic.evidence.readers.trainer_state import list_folder

METRICS = ("metrics.jsonl", "logging.jsonl")  # of klinic, prime-rl and tinker; of ms-swift
JSON_LINES = (".jsonl", ".ndjson")
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".joblib")
PICKLE_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
TEXTS = (".log", ".txt", ".out")
MAX_ENTRIES = 10_000  # entries of a folder that are inspected

NO_NAMES: Mapping[str, str] = {}

Reader = Callable[[Path], ScalarLog]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """A readable log, and the function that reads it."""

    label: str
    read: Callable[[], ScalarLog]


def read_log(path: Path, names: Mapping[str, str] = NO_NAMES) -> ScalarLog:
    """Return the scalar log at a path; raise `EvidenceError` if there is none.

    `names` maps metrics of klinic to their names in the log, where klinic does not know them.
    """
    sources = list(logs_in_folder(path)) if path.is_dir() else [log_of_file(path)]
    if not sources:
        raise EvidenceError(_no_log_message(path))
    also = [other.label for other in sources[1:]]
    if path.is_dir() and (advice := advise_convert(path)):
        also.append(advice)
    return replace(use_names(sources[0].read(), names), also=tuple(also))


def has_records(run: Path) -> bool:
    """Whether a folder has token-level records of klinic's format."""
    return any((run / "records").glob("step=*/complete.json"))


def logs_in_folder(folder: Path) -> Iterator[LogSource]:
    """Yield the logs of a folder, the most detailed first."""
    if state := trainer_state.find_state_file(folder):
        yield LogSource(label=str(state), read=lambda: trainer_state.read_log(state))
    inside = list_folder(folder)[:MAX_ENTRIES]
    rollouts = verl_rollouts.find_rollouts(folder)
    lines = [
        p for p in _with_suffix(inside, JSON_LINES) if p not in rollouts and not is_dump_file(p)
    ]
    if metrics := _metrics_file(lines):
        yield LogSource(label=str(metrics), read=lambda: json_lines.read_log(metrics))
    yield from _tracker_logs(folder, inside)
    if rollouts:
        yield LogSource(label=str(rollouts[0]), read=lambda: verl_rollouts.read_log(rollouts))
    for text in _with_suffix(inside, TEXTS):
        if console_text.has_metrics(text):
            yield _text_source(text)


def _tracker_logs(folder: Path, inside: list[Path]) -> Iterator[LogSource]:
    """Yield the logs of W&B, TensorBoard, MLflow and trackio, and exported tables."""
    if runs := _wandb_runs(folder):
        newest = runs[-1]
        yield LogSource(label=str(newest), read=lambda: wandb.read_log(newest))
    if events := _event_files(folder):
        yield LogSource(label=str(events[0]), read=lambda: tensorboard.read_log(events))
    if run := mlflow_files.find_run(folder):
        yield LogSource(label=str(run), read=lambda: mlflow_files.read_log(run))
    if databases := _with_suffix(inside, (trackio_db.SUFFIX,)):
        database = max(databases, key=lambda path: path.stat().st_mtime)
        yield LogSource(label=str(database), read=lambda: trackio_db.read_log(database))
    for tables in table_csv.split_runs(_with_suffix(inside, table_csv.SUFFIXES)):
        yield LogSource(label=str(tables[0]), read=partial(table_csv.read_log, tables))


def log_of_file(path: Path) -> LogSource:
    """Return the log of a file, detected by its name, then by its first bytes."""
    refuse_pickle(path)
    reader = _reader_of_binary(path) or _reader_of_text(path)
    if reader is None:
        raise EvidenceError(
            f"{path}: is not a log that klinic reads. Pass a run of klinic, a trainer_state.json, "
            "JSON or JSON lines, CSV, an event file of TensorBoard, a .wandb file, the database of "
            "trackio, or the text that a trainer printed; or a folder with one of them."
        )
    return LogSource(label=str(path), read=lambda: reader(path))


def _reader_of_binary(path: Path) -> Reader | None:
    begins = _first_bytes(path)
    if tensorboard.is_events(path):
        return lambda file: tensorboard.read_log((file,))
    if path.suffix == wandb.SUFFIX or begins.startswith(wandb.MAGIC[:4]):
        return wandb.read_log
    return trackio_db.read_log if begins.startswith(trackio_db.MAGIC) else None


def _reader_of_text(path: Path) -> Reader | None:
    begins = _first_bytes(path)
    text = begins.lstrip(b"\xef\xbb\xbf \t\r\n")
    if path.suffix in table_csv.SUFFIXES:
        return lambda file: table_csv.read_log((file,))
    if path.suffix == ".json" or (text.startswith(b"[") and path.suffix not in TEXTS):
        return json_document.read_log
    if path.suffix in JSON_LINES or text.startswith(b'{"'):
        if verl_rollouts.is_rollouts(path):
            return lambda file: verl_rollouts.read_log((file,))
        return json_lines.read_log
    return console_text.read_log if path.suffix in TEXTS or _is_text(begins) else None


def _text_source(path: Path) -> LogSource:
    return LogSource(label=str(path), read=lambda: console_text.read_log(path))


def _is_text(begins: bytes) -> bool:
    """Whether the first bytes of a file are printable text or escape codes of a terminal."""
    try:
        getincrementaldecoder("utf-8")().decode(begins)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    return bool(begins) and all(byte >= 32 or byte in b"\t\n\r\x1b\f" for byte in begins)


def refuse_pickle(path: Path) -> None:
    """Raise `EvidenceError` for a pickle: unpickling would execute code in it."""
    if path.suffix in PICKLES or _first_bytes(path).startswith(PICKLE_STARTS):
        raise EvidenceError(advise_convert(path) or _pickle_message(path))


def _pickle_message(path: Path) -> str:
    return (
        f"{path}: is a pickle or an archive of one, and reading it would execute any code in "
        "it. Convert it where it was made: json.dump the result of `torch.load`, one "
        "object per step, or write the evidence as docs/how-to/write-evidence.md shows."
    )


def _first_bytes(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(64)


def _metrics_file(lines: list[Path]) -> Path | None:
    """Return metrics.jsonl or logging.jsonl, or the only JSON-lines file."""
    named = [path for name in METRICS for path in lines if path.name == name]
    return named[0] if named else lines[0] if len(lines) == 1 else None


def _with_suffix(inside: list[Path], suffixes: tuple[str, ...]) -> list[Path]:
    return [path for path in inside if path.suffix in suffixes and path.is_file()]


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
    if advice := advise_convert(folder):
        return advice
    names = [child.name for child in list_folder(folder)[:MAX_ENTRIES]]
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        return (
            f"{folder}: has {pickles[0]}, a pickle, and nothing that klinic reads: unpickling "
            "would execute any code in it. Save the log as JSON lines where it was made, or write "
            "the evidence as docs/how-to/write-evidence.md shows."
        )
    lines = [name for name in names if name.endswith(JSON_LINES)]
    if len(lines) > 1:
        return (
            f"{folder}: has {len(lines)} logs of JSON lines ({', '.join(lines[:6])}), and a "
            f"diagnosis is of one. Give one of them: {folder / lines[0]}"
        )
    return (
        f"{folder} has no records, so there is nothing to diagnose. Pass the folder of a run: "
        "klinic's has `records/step=...` (output.records_every: 1); of others it reads "
        "trainer_state.json, JSON lines, CSV, event files of TensorBoard, .wandb files, MLflow and "
        "trackio runs, printed text, and the token dumps of docs/how-to/other-trainers.md."
    )
