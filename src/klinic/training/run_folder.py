"""The run folder: its path, its lock, and which recipe may continue it."""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count, takewhile
from pathlib import Path
from typing import IO, Any

from klinic.errors import ConfigError, EvidenceError, MachineError
from klinic.evidence.remote.url import local_folder
from klinic.evidence.run_facts import LOCK, METRICS, RECIPE, RUN_FACTS
from klinic.evidence.schema import refuse_newer
from klinic.evidence.writing import open_log, refuse_links_out, write_atomically
from klinic.recipe.keys import flatten_settings
from klinic.recipe.loading import dump_recipe, load_recipe
from klinic.recipe.recipe import Recipe
from klinic.runtime.user_code import protect_descriptor

RESTARTED_EVENT = "restarted"  # the event of a run that is restarted after a crash
ENGINE_LOG = "vllm.log"
START_FOLDER = "start"
RUNS_FOLDER = Path("runs")

# recipe keys that may differ between a run and its continuation
MUTABLE_KEYS = (
    "output.",
    "loop.max_steps",
    "loop.eval_every",
    "loop.checkpoint_",
    "loop.keep_",
    "loop.show_",
    "recovery",
    "learner.replicas",
    "learner.shards",
)


def entry_step(entry: Mapping[str, Any], folder: Path) -> int:
    """Return the step of a line in the metrics."""
    step = entry.get("step")
    if not isinstance(step, int):
        raise EvidenceError(
            f"{folder / METRICS} has a line without a step, so it cannot be truncated to the "
            "checkpoint. Restore the file from a copy, or delete the line."
        )
    return step


def open_folder(recipe: Recipe, name: str, *, resume: bool) -> Path:
    """Return the folder of a new run, or with `resume` that of the run to continue."""
    chosen = recipe.output.dir
    if resume:
        folder = resume_folder(recipe, name)
        if not (folder / RECIPE).is_file():
            raise ConfigError(
                f"there is no run in {folder} to resume. Leave --resume out to start one."
            )
        refuse_links_out(folder)
        refuse_newer(folder)
        refuse_other_recipe(recipe, folder)
        return folder
    return new_folder(
        chosen, name, instead="Continue that run with --resume, or give another output.dir."
    )


def resume_folder(recipe: Recipe, name: str) -> Path:
    """Return the folder of the run that a recipe continues."""
    chosen = recipe.output.dir
    return local_folder(chosen) if chosen else _newest_folder(name)


def move_aside(recipe: Recipe, name: str) -> Path | None:
    """Rename the folder of a run that a new run replaces; None if there is none."""
    chosen = recipe.output.dir
    folder = local_folder(chosen) if chosen else _newest_folder(name)
    if not folder.is_dir() or is_unused_folder(folder):
        return None
    if not (folder / RECIPE).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run, so --start-over does not move it. Give "
            "another output.dir."
        )
    return rename_aside(folder)


def rename_aside(folder: Path) -> Path:
    """Rename a run folder in which no process trains; return its new path."""
    names = (folder.with_name(f"{folder.name}.old-{number}") for number in count(1))
    old_folder = next(path for path in names if not path.exists())
    with lock_folder(folder):  # no other process trains there
        folder.rename(old_folder)
    return old_folder


def folder_identity(folder: Path) -> tuple[int, int]:
    """Return device and inode of a folder, which survive a rename."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def refuse_moved(
    folder: Path, identity: tuple[int, int], cause: BaseException | None = None
) -> None:
    """Stop if the run folder is no longer at its path; never write to another in its place."""
    try:
        current = folder_identity(folder)
    except FileNotFoundError:
        current = None
    if current != identity:
        raise MachineError(
            f"{folder} was moved or deleted while the run trained there, so nothing more was "
            "written. Put the folder back, and continue with --resume."
        ) from cause


def new_folder(chosen: str | None, name: str, *, instead: str) -> Path:
    """Return the folder of a new run: the chosen one, which must be empty, or the next free one."""
    if chosen is None:
        return next(folder for folder in _numbered_folders(name) if _make_folder(folder))
    folder = local_folder(chosen)
    if folder.exists() and not is_unused_folder(folder):
        raise ConfigError(f"output.dir is {folder}, which is not empty. {instead}")
    _make_folder(folder)
    return folder


def is_unused_folder(folder: Path) -> bool:
    """Whether a folder is empty, or holds only lock and recipe of a run that failed at its start.

    A recipe without a lock is the user's own.
    """
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return names <= {LOCK} or names == {LOCK, RECIPE}


def _make_folder(folder: Path) -> bool:
    """Create a folder; return whether it is new."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    except NotADirectoryError as error:  # invalid on every machine
        raise ConfigError(
            f"output.dir is {folder}, which cannot be created: {error.strerror}. Give another."
        ) from error
    except OSError as error:
        raise MachineError(
            f"{error.strerror}: output.dir is {folder}, which cannot be created. Fix that, or "
            "give another."
        ) from error
    return True


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the exclusive lock of a run folder."""
    # not truncated before the lock is held: it may contain the pid of its holder
    with _keep_lock_open(open_log(folder / LOCK)) as file:
        if not _try_lock(file):
            raise ConfigError(
                f"{folder} is in use: another process trains there. Wait for it or stop it, or "
                "give another output.dir."
            )
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        with protect_descriptor(file.fileno()), _explain_moved_folder(folder):
            yield


@contextmanager
def _explain_moved_folder(folder: Path) -> Iterator[None]:
    """Explain a missing file by a moved run folder, where that is the reason."""
    identity = folder_identity(folder)
    try:
        yield
    except FileNotFoundError as error:
        refuse_moved(folder, identity, error)
        raise


@contextmanager
def _keep_lock_open(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Keep a lock file open in this process alone; a forked child closes it."""
    _locks.add(file)
    try:
        yield file
    finally:
        _locks.discard(file)
        with suppress(OSError):  # a user function closed the descriptor; that is reported elsewhere
            file.close()


def _close_inherited_locks() -> None:
    for file in _locks:
        with suppress(OSError):
            file.close()


_locks: set[IO[bytes]] = set()
os.register_at_fork(after_in_child=_close_inherited_locks)


def _try_lock(file: IO[bytes]) -> bool:
    """Whether the lock was acquired; retries, since `klinic watch` holds it for an instant."""
    for wait in (0.05, 0.1, 0.2, None):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if wait is not None:
                time.sleep(wait)
        else:
            return True
    return False


def last_locked_by(pid: int, recipe: Recipe, name: str) -> Path | None:
    """Return the folder whose lock a process, dead or alive, held last; None without one."""
    chosen = recipe.output.dir
    candidates = (
        [local_folder(chosen)] if chosen else takewhile(Path.exists, _numbered_folders(name))
    )
    locked_folders = [folder for folder in candidates if lock_holder_pid(folder) == str(pid)]
    return locked_folders[-1] if locked_folders else None  # an older run may have had the same pid


def lock_holder_pid(folder: Path) -> str:
    """Return the pid that last locked a run; empty without one."""
    try:
        return (folder / LOCK).read_text()
    except OSError:
        return ""


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Save the resolved recipe."""
    write_atomically(folder / RECIPE, dump_recipe(recipe).encode())


def refuse_other_recipe(recipe: Recipe, folder: Path) -> None:
    """Refuse to continue a run with a different recipe."""
    saved = load_recipe(folder / RECIPE).recipe
    now, then = (flatten_settings(section.model_dump(mode="json")) for section in (recipe, saved))
    differing = [
        key
        for key in sorted(now.keys() | then.keys())
        if now.get(key) != then.get(key) and not key.startswith(MUTABLE_KEYS)
    ]
    if recipe.learner.schedule != "constant" and recipe.loop.max_steps != saved.loop.max_steps:
        differing.append("loop.max_steps")
    if differing:
        listed = "\n".join(
            f"{key} is {json.dumps(now.get(key))} and was {json.dumps(then.get(key))}."
            for key in differing
        )
        raise ConfigError(
            f"this is not the recipe of the run in {folder}:\n{listed}\nA run cannot continue "
            "with other settings. Resume with its own recipe, or name another run with output.dir."
        )


def _numbered_folders(name: str) -> Iterator[Path]:
    yield RUNS_FOLDER / name
    number = 2
    while True:
        yield RUNS_FOLDER / f"{name}-{number}"
        number += 1


def _newest_folder(name: str) -> Path:
    """Return the newest folder of this name in which a run started."""
    existing = list(takewhile(Path.exists, _numbered_folders(name)))
    # run.json exists once the run is assembled
    started = [folder for folder in existing if (folder / RUN_FACTS).is_file()]
    return (started or existing or [RUNS_FOLDER / name])[-1]
