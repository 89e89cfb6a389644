"""Atomic checkpoints: written to a draft folder with digests, then renamed.

    checkpoints/step=000050/
        model/               loads with `from_pretrained`
        optimizer.safetensors
        reference.safetensors    only where the reference moves
        state.json           step, KL controller, learner, RNG streams, data position
        manifest.json        digest of every file above, and of itself; written last

A checkpoint is valid only if every digest matches. `newest_valid` reports which file of which
checkpoint is broken and why, and falls back to the checkpoint before it.

`run_checkpoints.py` defines the contents of state.json and what a checkpoint must match.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klinic.errors import CheckpointError, EvidenceError
from klinic.evidence.files import json_bytes, read_json, sha256_of
from klinic.evidence.schema import CHECKPOINT_SCHEMA, CHECKPOINTS, STATE
from klinic.evidence.writing import (
    remove_tree,
    sync_folder,
    write_atomically,
    write_durably,
)

FOLDER = CHECKPOINTS
MANIFEST = "manifest.json"
STEP_FOLDER_NAME = re.compile(r"step=(\d{6,})")
UNFINISHED = ".unfinished"
REPLACED = ".replaced"  # the old checkpoint of a step that is saved again
DAMAGED = ".damaged"  # kept for inspection, never resumed from


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files all match their digests."""

    folder: Path
    step: int
    state: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSearch:
    """The newest valid checkpoint, if any, and the errors of newer ones."""

    checkpoint: Checkpoint | None
    broken: list[str]


def write_checkpoint(
    run: Path,
    step: int,
    *,
    write_contents: Callable[[Path], dict[str, Any]],
    num_kept: int,
    protected_step: int | None = None,
) -> Path:
    """Write a checkpoint: `write_contents` fills a folder and returns the state.

    The newest `num_kept` checkpoints stay on disk, and that of `protected_step`.
    """
    final = run / FOLDER / folder_name(step)
    draft = final.with_name(final.name + UNFINISHED)
    remove_tree(draft)
    final.parent.mkdir(exist_ok=True)  # never the run folder itself, which may have been moved
    draft.mkdir()
    state = {"schema": CHECKPOINT_SCHEMA, "step": step, **write_contents(draft)}
    write_durably(draft / STATE, json_bytes(state))
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    digests = {str(path.relative_to(draft)): sha256_of(path) for path in files}
    for path in files:
        _fsync_file(path)
    write_atomically(
        draft / MANIFEST, json_bytes({"files": digests, "digest": _manifest_digest(digests)})
    )
    _move_into_place(draft, final)
    _prune_old(run, num_kept, protected_step)
    return final


def _move_into_place(draft: Path, final: Path) -> None:
    """Rename a finished checkpoint into place, then remove the one it replaces."""
    old = final.with_name(final.name + REPLACED)
    if final.exists():  # the step was saved before
        remove_tree(old)
        final.rename(old)
    draft.rename(final)
    sync_folder(final.parent)
    remove_tree(old)


def restore_replaced(run: Path) -> None:
    """Restore a checkpoint whose replacement was interrupted by a kill."""
    for old in (run / FOLDER).glob(f"step=*{REPLACED}"):
        final = old.with_name(old.name.removesuffix(REPLACED))
        if final.exists():
            remove_tree(old)
        else:
            old.rename(final)


def set_aside_damaged(run: Path, *, after: int, max_step: int | None) -> None:
    """Rename unreadable checkpoints, so that they are neither resumed from nor deleted."""
    for step, folder in _folders_by_step(run).items():
        if after < step and (max_step is None or step <= max_step):
            names = (f"{folder.name}{DAMAGED}{n}" for n in ("", *range(2, 1000)))
            free = (folder.with_name(name) for name in names)
            folder.rename(next(path for path in free if not path.exists()))


def newest_valid(run: Path, *, max_step: int | None = None) -> CheckpointSearch:
    """Return the newest valid checkpoint, at most of step `max_step`."""
    broken: list[str] = []
    for step, folder in sorted(_folders_by_step(run).items(), reverse=True):
        if max_step is not None and step > max_step:
            continue
        try:
            return CheckpointSearch(checkpoint=read_checkpoint(folder, step), broken=broken)
        except CheckpointError as error:
            broken.append(str(error))
    return CheckpointSearch(checkpoint=None, broken=broken)


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """Return a checkpoint after verifying the digest of every file."""
    manifest = _read_checkpoint_json(folder / MANIFEST)
    digests = manifest.get("files")
    if not isinstance(digests, dict) or manifest.get("digest") != _manifest_digest(digests):
        raise CheckpointError(f"{folder / MANIFEST} does not match its own digest.")
    for name, expected in digests.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing.")
        if _file_digest(path) != expected:
            raise CheckpointError(
                f"{path} is damaged: its digest has changed ({path.stat().st_size} bytes now)."
            )
    state = _read_checkpoint_json(folder / STATE)
    if state.get("schema") != CHECKPOINT_SCHEMA or state.get("step") != step:
        raise CheckpointError(
            f"{folder / STATE} has schema {state.get('schema')} and step {state.get('step')}, "
            f"not schema {CHECKPOINT_SCHEMA} and step {step}."
        )
    return Checkpoint(folder=folder, step=step, state=state)


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps that have checkpoints, valid or not."""
    return sorted(_folders_by_step(run))


def read_state(run: Path, step: int) -> dict[str, Any]:
    """Return the state of a checkpoint without verifying its other files."""
    return _read_checkpoint_json(run / FOLDER / folder_name(step) / STATE)


def folder_name(step: int) -> str:
    """Return the folder name of a step."""
    return f"step={step:06d}"


def parse_step(folder: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    match = STEP_FOLDER_NAME.fullmatch(folder.resolve().name)
    if match is None:
        raise CheckpointError(
            f"{folder} holds a checkpoint, but its name is not step=NNNNNN. Rename it."
        )
    return int(match[1])


def remove_unfinished(run: Path) -> None:
    """Remove the drafts of interrupted saves."""
    for folder in (run / FOLDER).glob(f"*{UNFINISHED}"):
        remove_tree(folder)


def remove_after(run: Path, step: int) -> None:
    """Remove checkpoints of later steps; a resumed run writes its own."""
    for later, folder in _folders_by_step(run).items():
        if later > step:
            _remove_checkpoint(folder)


def _folders_by_step(run: Path) -> dict[int, Path]:
    folders = {}
    for folder in (run / FOLDER).glob("step=*"):
        match = STEP_FOLDER_NAME.fullmatch(folder.name)
        if match:
            folders[int(match[1])] = folder
    return folders


def _prune_old(run: Path, num_kept: int, protected_step: int | None) -> None:
    for step, folder in sorted(_folders_by_step(run).items())[:-num_kept]:
        if step != protected_step:
            _remove_checkpoint(folder)


def _remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; after a kill it is absent, never partial."""
    away = folder.with_name(folder.name + UNFINISHED)
    remove_tree(away)
    folder.rename(away)
    remove_tree(away)


def _read_checkpoint_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except EvidenceError as error:
        raise CheckpointError(str(error)) from error


def _file_digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def _manifest_digest(digests: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _fsync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
