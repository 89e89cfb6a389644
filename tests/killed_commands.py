"""Start `klinic train` as a user does, kill it with SIGKILL, and resume it to its end."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.killing import KLINIC, environment, num_steps, process_of

RECIPE = """
model: tiny
seed: 3
threads: 1
data: {task: arithmetic}
kl: {coef: 0.05}
rewards: [graduated]
recovery: {}
sampling: {max_new_tokens: 6}
loop: {max_steps: 16, prompts_per_step: 4, group_size: 4, checkpoint_every: 3, eval_every: 5,
       eval_prompts: 4}
learner: {learning_rate: 1e-3, micro_batch_size: 8}
output: {trackers: []}
"""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When, and whom: the command with all it started, or only the process that trains."""

    after_step: int
    delay: float
    saving: bool
    """Wait until a checkpoint is being written."""
    whole: bool

    def has_come(self, run: Path) -> bool:
        if not (run / "recipe.yaml").exists() or num_steps(run) < self.after_step:
            return False
        return not self.saving or any((run / "checkpoints").glob("*.unfinished"))


def kills(num: int, seed: int, last_step: int = 15) -> Iterator[Kill]:
    """Yield moments all over a run; every third is in the middle of a save."""
    stream = random.Random(seed)  # noqa: S311 - moments, not secrets
    for number in range(num):
        saving = number % 3 == 2
        yield Kill(
            after_step=stream.randrange(0, last_step - 3 if saving else last_step),
            delay=stream.random() * (0.01 if saving else 0.3),
            saving=saving,
            whole=number % 2 == 0,
        )


class MissedError(Exception):
    """The moment of a kill went by."""


def start(folder: Path, cache: Path, *more: str) -> "subprocess.Popen[bytes]":
    """Start a supervised run of the recipe in a folder, in a session of its own."""
    folder.mkdir(exist_ok=True, parents=True)
    recipe = folder / "recipe.yaml"
    if not recipe.exists():
        recipe.write_text(RECIPE)
    with (folder / "printed.log").open("ab") as printed:
        return subprocess.Popen(
            [str(KLINIC), "train", str(recipe), f"output.dir={folder / 'run'}", *more],
            env=environment(cache, supervised=True),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )


def kill(process: "subprocess.Popen[bytes]", run: Path, *, whole: bool) -> None:
    """Kill the command and all it started, or the process that trains alone."""
    if whole:
        process.kill()  # what it started dies with it
    else:
        os.kill(process_of(run), signal.SIGKILL)


def kill_once(folder: Path, cache: Path, when: Kill, *more: str) -> str:
    """Start a run, kill it, resume it to its end; return when the kill came.

    A busy machine may miss a short moment: then the run ends by itself, as a `MissedError`.
    """
    process, run = start(folder, cache, *more), folder / "run"
    while process.poll() is None and not when.has_come(run):
        time.sleep(0.0005)
    time.sleep(when.delay)
    if process.poll() is not None:
        raise MissedError(f"the run was over before it could be killed: {when}")
    saving = any((run / "checkpoints").glob("*.unfinished"))
    done = num_steps(run)
    kill(process, run, whole=when.whole)
    finish(process, folder, cache, *more)
    who = "whole" if when.whole else "child"
    return f"{who} killed behind step {done}{', mid-save' if saving else ''}"


def finish(process: "subprocess.Popen[bytes]", folder: Path, cache: Path, *more: str) -> None:
    """Wait for a command; where it was killed itself, resume the run until it ends."""
    while process.wait() != 0:
        if process.returncode != -signal.SIGKILL:
            raise AssertionError((folder / "printed.log").read_text())
        process = start(folder, cache, "--resume", *more)
