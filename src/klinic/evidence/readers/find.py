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
from klinic.evidence.readers.trainer_state import children

METRICS = "metrics.jsonl"  # as in run_facts.py, which imports NumPy
JSON_LINES = (".jsonl", ".ndjson")
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".joblib")
PICKLE_STARTS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
MOST = 10_000  # entries of a folder that are inspected


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A readable log, and the function that reads it."""

    what: str
    read: Callable[[], ScalarLog]


def read_log(path: Path) -> ScalarLog:
    """Return the scalar log at a path; raise `EvidenceError` if there is none."""
    found = list(in_folder(path)) if path.is_dir() else [of_file(path)]
    if not found:
        raise EvidenceError(_nothing(path))
    return replace(found[0].read(), also=tuple(other.what for other in found[1:]))


def has_records(run: Path) -> bool:
    """Whether a folder has token-level records of klinic's format."""
    return any((run / "records").glob("step=*/complete.json"))


def in_folder(folder: Path) -> Iterator[Found]:
    """Yield the logs of a folder, the most detailed first."""
    if state := trainer_state.find(folder):
        yield Found(what=str(state), read=lambda: trainer_state.read(state))
    inside = children(folder)[:MOST]
    rollouts = verl_rollouts.find(folder)
    lines = [p for p in inside if p.suffix in JSON_LINES and p.is_file() and p not in rollouts]
    if metrics := _metrics(lines):
        yield Found(what=str(metrics), read=lambda: json_lines.read(metrics))
    if runs := _wandb_runs(folder):
        newest = runs[-1]
        yield Found(what=str(newest), read=lambda: wandb.read(newest))
    if events := _events(folder):
        yield Found(what=str(events[0]), read=lambda: tensorboard.read(events))
    if rollouts:
        yield Found(what=str(rollouts[0]), read=lambda: verl_rollouts.read(rollouts))


def of_file(path: Path) -> Found:
    """Return the log of a file, detected by its name, then by its first bytes."""
    refuse_pickle(path)
    if tensorboard.is_events(path):
        return Found(what=str(path), read=lambda: tensorboard.read((path,)))
    begins = _beginning(path)
    if path.suffix == wandb.SUFFIX or begins.startswith(wandb.MAGIC[:4]):
        return Found(what=str(path), read=lambda: wandb.read(path))
    if path.suffix == ".json":
        return Found(what=str(path), read=lambda: trainer_state.read(path))
    if path.suffix in JSON_LINES or begins.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        if verl_rollouts.is_rollouts(path):
            return Found(what=str(path), read=lambda: verl_rollouts.read((path,)))
        return Found(what=str(path), read=lambda: json_lines.read(path))
    raise EvidenceError(
        f"{path}: is not a log that klinic reads. Pass a run of klinic, a trainer_state.json, JSON "
        "lines, an event file of TensorBoard, or a .wandb file; or a folder with one of them."
    )


def refuse_pickle(path: Path) -> None:
    """Raise `EvidenceError` for a pickle: unpickling would execute code in it."""
    if path.suffix in PICKLES or _beginning(path).startswith(PICKLE_STARTS):
        raise EvidenceError(
            f"{path}: is a pickle or an archive of one, and reading it would execute any code in "
            "it. Convert it where it was made: json.dump the result of `torch.load`, one "
            "object per step, or write the evidence as docs/how-to/write-evidence.md shows."
        )


def _beginning(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(64)


def _metrics(lines: list[Path]) -> Path | None:
    """Return metrics.jsonl, or the only JSON-lines file."""
    named = [path for path in lines if path.name == METRICS]
    return named[0] if named else lines[0] if len(lines) == 1 else None


def _wandb_runs(folder: Path) -> list[Path]:
    """Return the .wandb files in the folder, in `wandb/` and in their `run-` folders."""
    places = [folder, *(p for p in children(folder)[:MOST] if "run-" in p.name)]
    if (folder / "wandb").is_dir():
        places += [p for p in children(folder / "wandb")[:MOST] if "run-" in p.name]
    found = [p for place in places for p in children(place) if p.suffix == wandb.SUFFIX]
    return sorted((p for p in found if p.is_file()), key=lambda path: path.parent.name)


def _events(folder: Path) -> tuple[Path, ...]:
    """Return the event files of the folder, or of its newest subfolder or that of `runs`."""
    here = [p for p in children(folder)[:MOST] if tensorboard.is_events(p) and p.is_file()]
    if here:
        return tensorboard.order(here)
    below = [p for p in children(folder / "runs") + children(folder) if p.is_dir()]
    for place in reversed(below[:MOST]):
        found = [p for p in children(place) if tensorboard.is_events(p) and p.is_file()]
        if found:
            return tensorboard.order(found)
    return ()


def _nothing(folder: Path) -> str:
    names = [child.name for child in children(folder)[:MOST]]
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
