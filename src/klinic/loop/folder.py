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
from klinic.evidence.run_facts import LOCK, METRICS, RECIPE, RUN_FACTS
from klinic.evidence.schema import refuse_newer
from klinic.evidence.writing import open_log, refuse_links_out, write_atomically
from klinic.recipe.keys import dotted
from klinic.recipe.loading import dump, load
from klinic.recipe.recipe import Recipe
from klinic.user_code import needing

RESTARTED = "restarted"  # the event of a run that is restarted after a crash
ENGINE_LOG = "vllm.log"
START = "start"
TENSORBOARD = "tensorboard"
RUNS = Path("runs")

# recipe keys that may differ between a run and its continuation
MAY_CHANGE = (
    "output.",
    "loop.max_steps",
    "loop.eval_every",
    "loop.checkpoint_",
    "loop.keep_",
    "loop.show_",
    "recovery",
    "learner.shards",
)


def step_of(entry: Mapping[str, Any], folder: Path) -> int:
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
        folder = Path(chosen).expanduser() if chosen else _newest(name)
        if not (folder / RECIPE).is_file():
            raise ConfigError(
                f"there is no run in {folder} to resume. Leave --resume out to start one."
            )
        refuse_links_out(folder)
        refuse_newer(folder)
        refuse_other(recipe, folder)
        return folder
    return new_folder(
        chosen, name, instead="Continue that run with --resume, or give another output.dir."
    )


def move_aside(recipe: Recipe, name: str) -> Path | None:
    """Rename the folder of a run that a new run replaces; None if there is none."""
    chosen = recipe.output.dir
    folder = Path(chosen).expanduser() if chosen else _newest(name)
    if not folder.is_dir() or is_free(folder):
        return None
    if not (folder / RECIPE).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run, so --start-over does not move it. Give "
            "another output.dir."
        )
    names = (folder.with_name(f"{folder.name}.old-{number}") for number in count(1))
    aside = next(path for path in names if not path.exists())
    with locked(folder):  # no other process trains there
        folder.rename(aside)
    return aside


def identity_of(folder: Path) -> tuple[int, int]:
    """Return device and inode of a folder, which survive a rename."""
    found = folder.stat()
    return found.st_dev, found.st_ino


def refuse_moved(
    folder: Path, identity: tuple[int, int], cause: BaseException | None = None
) -> None:
    """Stop if the run folder is no longer at its path; never write to another in its place."""
    try:
        there = identity_of(folder)
    except FileNotFoundError:
        there = None
    if there != identity:
        raise MachineError(
            f"{folder} was moved or deleted while the run trained there, so nothing more was "
            "written. Put the folder back, and continue with --resume."
        ) from cause


def as_named(folder: Path, recipe: Recipe) -> Path:
    """Return the run folder as the recipe names it, so that records hold no machine-specific path.

    Valid only while the working directory is the one in which the run started.
    """
    chosen = recipe.output.dir
    if chosen is not None and Path(chosen).expanduser().is_absolute():
        return folder
    return Path(os.path.relpath(folder))


def new_folder(chosen: str | None, name: str, *, instead: str) -> Path:
    """Return the folder of a new run: the chosen one, which must be empty, or the next free one."""
    if chosen is None:
        return next(folder for folder in _numbered(name) if _made(folder))
    folder = Path(chosen).expanduser()
    if folder.exists() and not is_free(folder):
        raise ConfigError(f"output.dir is {folder}, which is not empty. {instead}")
    _made(folder)
    return folder


def is_free(folder: Path) -> bool:
    """Whether a folder is empty, or holds only the lock of a run killed at its start."""
    return folder.is_dir() and all(path.name == LOCK for path in folder.iterdir())


def _made(folder: Path) -> bool:
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
def locked(folder: Path) -> Iterator[None]:
    """Hold the exclusive lock of a run folder."""
    # not truncated before the lock is held: it may contain the pid of its holder
    with _held(open_log(folder / LOCK)) as file:
        if not _taken(file):
            raise ConfigError(
                f"{folder} is in use: another process trains there. Wait for it or stop it, or "
                "give another output.dir."
            )
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        with needing(file.fileno()), _in_place(folder):
            yield


@contextmanager
def _in_place(folder: Path) -> Iterator[None]:
    """Explain a missing file by a moved run folder, where that is the reason."""
    identity = identity_of(folder)
    try:
        yield
    except FileNotFoundError as error:
        refuse_moved(folder, identity, error)
        raise


@contextmanager
def _held(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Keep a lock file open in this process alone; a forked child closes it."""
    _locks.add(file)
    try:
        yield file
    finally:
        _locks.discard(file)
        with suppress(OSError):  # a user function closed the descriptor; that is reported elsewhere
            file.close()


def _let_go() -> None:
    for file in _locks:
        with suppress(OSError):
            file.close()


_locks: set[IO[bytes]] = set()
os.register_at_fork(after_in_child=_let_go)


def _taken(file: IO[bytes]) -> bool:
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


def held_by(pid: int, recipe: Recipe, name: str) -> Path | None:
    """Return the folder whose lock a process, dead or alive, held last; None without one."""
    chosen = recipe.output.dir
    given = [Path(chosen).expanduser()] if chosen else takewhile(Path.exists, _numbered(name))
    held = [folder for folder in given if holder(folder) == str(pid)]
    return held[-1] if held else None  # an older run may have had the same pid


def holder(folder: Path) -> str:
    """Return the pid that last locked a run; empty without one."""
    try:
        return (folder / LOCK).read_text()
    except OSError:
        return ""


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Save the resolved recipe."""
    write_atomically(folder / RECIPE, dump(recipe).encode())


def refuse_other(recipe: Recipe, folder: Path) -> None:
    """Refuse to continue a run with a different recipe."""
    saved = load(folder / RECIPE).recipe
    now, then = (dotted(one.model_dump(mode="json")) for one in (recipe, saved))
    differing = [
        key
        for key in sorted(now.keys() | then.keys())
        if now.get(key) != then.get(key) and not key.startswith(MAY_CHANGE)
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


def _numbered(name: str) -> Iterator[Path]:
    yield RUNS / name
    number = 2
    while True:
        yield RUNS / f"{name}-{number}"
        number += 1


def _newest(name: str) -> Path:
    """Return the newest folder of this name in which a run started."""
    there = list(takewhile(Path.exists, _numbered(name)))
    # run.json exists once the run is assembled
    began = [folder for folder in there if (folder / RUN_FACTS).is_file()]
    return (began or there or [RUNS / name])[-1]
