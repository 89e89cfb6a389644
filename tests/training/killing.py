"""Start `klinic train` for real, kill it, and compare what two runs left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from klinic.evidence import store

KLINIC = Path(sys.executable).with_name("klinic")

RECIPE = """
model: tiny
threads: 1
data: {task: arithmetic}
warm_start: {steps: 30, batch_size: 32}
kl: {coef: 0.02, controller: ziegler, target: 0.01}
rewards: [graduated]
sampling: {max_new_tokens: 6}
loop: {max_steps: 12, prompts_per_step: 4, group_size: 4, checkpoint_every: 2, eval_every: 5,
       eval_prompts: 10}
learner: {learning_rate: 3e-4, micro_batch_size: 8, updates_per_batch: 2, schedule: cosine}
"""


def command(folder: Path, *more: str) -> list[str]:
    return [
        str(KLINIC),
        "train",
        str(folder / "recipe.yaml"),
        f"output.dir={folder / 'run'}",
        *more,
    ]


def environment(cache: Path, *, supervised: bool = False) -> dict[str, str]:
    """Return what a run finds around it: nobody who starts it again, unless a test wants that."""
    alone = {} if supervised else {"KLINIC_SUPERVISED": "0"}
    return {**os.environ, "KLINIC_CACHE": str(cache), "OMP_NUM_THREADS": "1", **alone}


def process_of(run: Path) -> int:
    """Return the process that trains in a folder."""
    return int((run / ".lock").read_text())


def run_whole(folder: Path, cache: Path, *more: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    if not (folder / "recipe.yaml").exists():
        (folder / "recipe.yaml").write_text(RECIPE)
    done = subprocess.run(
        command(folder, *more), env=environment(cache), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_killed(folder: Path, cache: Path, when: "Moment | GoingBack", *more: str) -> str:
    """Start a run and kill it at a moment; return what it was doing, by what it left behind."""
    folder.mkdir(exist_ok=True)
    if not (folder / "recipe.yaml").exists():
        (folder / "recipe.yaml").write_text(RECIPE)
    process = subprocess.Popen(
        command(folder, *more),
        env=environment(cache),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run = folder / "run"
    while process.poll() is None and not when.has_come(run):
        time.sleep(0.0005)
    time.sleep(when.delay)
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert alive, "the run was over before it could be killed"
    saving = any((run / "checkpoints").glob("*.unfinished"))
    return "mid-save" if saving else f"behind step {num_steps(run)}"


@dataclass(frozen=True)
class Moment:
    """Some seconds after a step was written down, or as soon as a checkpoint is being written."""

    step: int
    delay: float = 0.0
    saving: bool = False

    def has_come(self, run: Path) -> bool:
        if not (run / "recipe.yaml").exists() or num_steps(run) < self.step:
            return False  # before its recipe is written there is no run yet
        return not self.saving or any((run / "checkpoints").glob("*.unfinished"))


@dataclass(frozen=True)
class GoingBack:
    """On the way back to a checkpoint: decided and written down, and not yet there."""

    delay: float = 0.0

    def has_come(self, run: Path) -> bool:
        path = run / "recovery.json"
        return path.exists() and json.loads(path.read_text())["back_to"] is not None


def num_steps(run: Path) -> int:
    """Return how many steps are in the metrics."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"policy_loss"') if path.exists() else 0


def differences(one: Path, other: Path) -> list[str]:
    """Return what differs between two runs, timings left out: nothing, if they are one run."""
    from safetensors.numpy import load_file  # not there where the rest of this file is read

    found = [f"metrics: {line}" for line in _lines(metrics(one), metrics(other))]
    if store.complete_steps(one) != store.complete_steps(other):
        found.append(
            f"recorded steps: {store.complete_steps(one)} and {store.complete_steps(other)}"
        )
    for step in store.complete_steps(one):
        found += [f"step {step}: {name}" for name in _records(one, other, step)]
    for name in sorted({p.relative_to(newest(one)) for p in newest(one).rglob("*.safetensors")}):
        a, b = (load_file(newest(run) / name) for run in (one, other))
        if a.keys() != b.keys():
            found.append(f"{name}: other tensors")
        found += [f"{name}: {key}" for key in a if not np.array_equal(a[key], b[key])]
    a, b = (_state(newest(run)) for run in (one, other))
    return found + [f"state.json: {key}" for key in a.keys() | b.keys() if a.get(key) != b.get(key)]


def _state(folder: Path) -> dict[str, Any]:
    """Return the state of a checkpoint, without where its run is."""
    state = json.loads((folder / "state.json").read_text())
    state["reference"] = {**state["reference"], "source": None}
    return state


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step=*"))


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith("time/")}
        for line in lines
    ]


def _lines(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    if len(one) != len(other):
        return [f"{len(one)} lines and {len(other)}"]
    return [
        f"step {a['step']}: {[k for k in a.keys() | b.keys() if a.get(k) != b.get(k)]}"
        for a, b in zip(one, other, strict=True)
        if a != b
    ]


def _records(one: Path, other: Path, step: int) -> list[str]:
    a, b = (store.read_record(run, step) for run in (one, other))
    names = type(a).__slots__
    same = {name: _equal(getattr(a, name), getattr(b, name)) for name in names}
    return [name for name, equal in same.items() if not equal]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)
