"""Atomic checkpoints: written to a draft folder with digests, then renamed.

    checkpoints/step=000050/
        model/               loads with `from_pretrained`
        optimizer.safetensors
        reference.safetensors    only where the reference moves
        state.json           step, KL controller, learner, RNG streams, data position
        manifest.json        digest of every file above, and of itself; written last

A checkpoint is valid only if every digest matches. `newest_valid` reports which file of which
checkpoint is broken and why, and falls back to the checkpoint before it.
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
NAME = re.compile(r"step=(\d{6,})")
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
class Found:
    """The newest valid checkpoint, if any, and the errors of newer ones."""

    checkpoint: Checkpoint | None
    broken: list[str]


def write(
    run: Path,
    step: int,
    *,
    fill: Callable[[Path], dict[str, Any]],
    keep: int,
    spare: int | None = None,
) -> Path:
    """Write a checkpoint: `write_contents` fills a folder and returns the state.

    The newest `num_kept` checkpoints stay on disk, and that of `protected_step`.
    """
    final = run / FOLDER / name_of(step)
    draft = final.with_name(final.name + UNFINISHED)
    remove_tree(draft)
    final.parent.mkdir(exist_ok=True)  # never the run folder itself, which may have been moved
    draft.mkdir()
    state = {"schema": CHECKPOINT_SCHEMA, "step": step, **fill(draft)}
    write_durably(draft / STATE, json_bytes(state))
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    digests = {str(path.relative_to(draft)): sha256_of(path) for path in files}
    for path in files:
        _sync(path)
    write_atomically(draft / MANIFEST, json_bytes({"files": digests, "digest": _over(digests)}))
    _swap(draft, final)
    _prune(run, keep, spare)
    return final


def _swap(draft: Path, final: Path) -> None:
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


def set_aside_damaged(run: Path, *, after: int, at_most: int | None) -> None:
    """Rename unreadable checkpoints, so that they are neither resumed from nor deleted."""
    for step, folder in _folders(run).items():
        if after < step and (at_most is None or step <= at_most):
            names = (f"{folder.name}{DAMAGED}{n}" for n in ("", *range(2, 1000)))
            free = (folder.with_name(name) for name in names)
            folder.rename(next(path for path in free if not path.exists()))


def newest_good(run: Path, *, at_most: int | None = None) -> Found:
    """Return the newest valid checkpoint, at most of step `max_step`."""
    broken: list[str] = []
    for step, folder in sorted(_folders(run).items(), reverse=True):
        if at_most is not None and step > at_most:
            continue
        try:
            return Found(checkpoint=read(folder, step), broken=broken)
        except CheckpointError as error:
            broken.append(str(error))
    return Found(checkpoint=None, broken=broken)


def read(folder: Path, step: int) -> Checkpoint:
    """Return a checkpoint after verifying the digest of every file."""
    manifest = _json(folder / MANIFEST)
    digests = manifest.get("files")
    if not isinstance(digests, dict) or manifest.get("digest") != _over(digests):
        raise CheckpointError(f"{folder / MANIFEST} does not match its own digest.")
    for name, expected in digests.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing.")
        if _digest_of(path) != expected:
            raise CheckpointError(
                f"{path} is damaged: its digest has changed ({path.stat().st_size} bytes now)."
            )
    state = _json(folder / STATE)
    if state.get("schema") != CHECKPOINT_SCHEMA or state.get("step") != step:
        raise CheckpointError(
            f"{folder / STATE} has schema {state.get('schema')} and step {state.get('step')}, "
            f"not schema {CHECKPOINT_SCHEMA} and step {step}."
        )
    return Checkpoint(folder=folder, step=step, state=state)


def steps(run: Path) -> list[int]:
    """Return the steps that have checkpoints, valid or not."""
    return sorted(_folders(run))


def state_of(run: Path, step: int) -> dict[str, Any]:
    """Return the state of a checkpoint without verifying its other files."""
    return _json(run / FOLDER / name_of(step) / STATE)


def name_of(step: int) -> str:
    """Return the folder name of a step."""
    return f"step={step:06d}"


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    match = NAME.fullmatch(folder.resolve().name)
    if match is None:
        raise CheckpointError(
            f"{folder} holds a checkpoint, but its name is not step=NNNNNN. Rename it."
        )
    return int(match[1])


def forget_unfinished(run: Path) -> None:
    """Remove the drafts of interrupted saves."""
    for folder in (run / FOLDER).glob(f"*{UNFINISHED}"):
        remove_tree(folder)


def forget_after(run: Path, step: int) -> None:
    """Remove checkpoints of later steps; a resumed run writes its own."""
    for later, folder in _folders(run).items():
        if later > step:
            _remove(folder)


def _folders(run: Path) -> dict[int, Path]:
    found = {}
    for folder in (run / FOLDER).glob("step=*"):
        match = NAME.fullmatch(folder.name)
        if match:
            found[int(match[1])] = folder
    return found


def _prune(run: Path, keep: int, spare: int | None) -> None:
    for step, folder in sorted(_folders(run).items())[:-keep]:
        if step != spare:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a checkpoint; after a kill it is absent, never partial."""
    away = folder.with_name(folder.name + UNFINISHED)
    remove_tree(away)
    folder.rename(away)
    remove_tree(away)


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except EvidenceError as error:
        raise CheckpointError(str(error)) from error


def _digest_of(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def _over(digests: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
