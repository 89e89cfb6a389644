"""Long runs made without a model: `python tests/hostile/long_run.py --steps 10000` times them.

A bare run has log-probs and rewards only, a whole one has every column and fact that klinic
records. `spoil` gives a run a fault from some step on, so that findings can be compared as well.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from klinic.evidence import store
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import write_run_facts, write_tokens
from klinic.runtime.process_tree import descendant_pids

ROWS, LENGTH, GROUP, VOCABULARY = 16, 40, 4, 30
RUN = {
    "eos_ids": [1],
    "vocabulary_size": VOCABULARY,
    "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
    "sampler": {"max_version_lag": 0, "dtype": "fp32"},
    "policy": {"dtype": "fp32", "num_experts": 0},
    "reference": {"kind": "copy", "source": "start", "wanted": "start"},
    "estimator": "unbiased",
    "advantage": "leave_one_out",
    "logp_old": "scored",
}
FAULTS = ("none", "stale", "mask", "rewards", "temperature", "shift", "nan", "groups", "metric")


def bare_record(step, seed=0):
    """Return a step with log-probs and rewards, and nothing else."""
    random = np.random.default_rng([seed, step])
    logp = -np.abs(random.normal(size=ROWS * LENGTH)).astype(np.float32)
    return StepRecord(
        step=step,
        row_offsets=np.arange(ROWS + 1) * LENGTH,
        group=np.arange(ROWS),
        prompt_offsets=np.arange(ROWS + 1) * 2,
        prompt_ids=random.integers(0, VOCABULARY, ROWS * 2),
        reward=random.normal(size=ROWS),
        token_ids=random.integers(0, VOCABULARY, ROWS * LENGTH),
        loss_mask=np.ones(ROWS * LENGTH, bool),
        logp=logp,
        logp_old=logp,
        logp_sampler=logp,
        logp_ref=logp - np.float32(0.5),
    )


def whole_record(step, seed=0):
    """Return a step of a healthy run with every column and fact."""
    random = np.random.default_rng([seed, step])
    num = ROWS * LENGTH
    ids = random.integers(2, VOCABULARY, num)
    ids[LENGTH - 1 :: LENGTH] = 1
    entropy = np.abs(random.normal(1.0, 0.2, num))
    logp = (-random.gamma(2.0, entropy / 2)).astype(np.float32)
    reward = random.choice([0.0, 0.5, 1.0], size=ROWS)
    group = np.repeat(np.arange(ROWS // GROUP), GROUP)
    mean = reward.reshape(-1, GROUP).mean(1)[group]
    drift = np.float32(0.002 * min(step - 1, 50))
    version = step - 1
    return StepRecord(
        step=step,
        row_offsets=np.arange(ROWS + 1) * LENGTH,
        group=group,
        sample=np.arange(ROWS) % GROUP,
        prompt_index=random.integers(0, 1000, ROWS // GROUP)[group],
        prompt_offsets=np.arange(ROWS + 1) * 4,
        prompt_ids=random.integers(2, VOCABULARY, ROWS * 4),
        token_ids=ids,
        loss_mask=np.ones(num, bool),
        emitted_by=np.zeros(num, np.int8),
        finish_reason=np.array(["stop"] * ROWS, "<U6"),
        reward=reward,
        reward_parts={"exact": reward, "short": np.round(random.normal(size=ROWS), 1)},
        advantage=(reward - mean) * GROUP / (GROUP - 1),
        logp=logp,
        logp_old=logp,
        logp_ref=logp + drift * random.normal(size=num).astype(np.float32),
        logp_sampler=logp + np.float32(1e-6) * random.normal(size=num).astype(np.float32),
        logp_teacher=logp + 0.1 * random.normal(size=num).astype(np.float32),
        entropy=entropy.astype(np.float32),
        weight_version=np.full(num, version),
        token_advantage=((reward - mean) * GROUP / (GROUP - 1)).repeat(LENGTH),
        process=np.zeros(ROWS, np.int64),
        cached_tokens=np.zeros(ROWS, np.int64),
        prompt_ids_match=np.ones(ROWS, bool),
        round_trip=np.ones(ROWS, bool),
        facts=whole_facts(version),
    )


def whole_facts(version):
    """Return the facts of a step of a healthy run."""
    return {
        "learner_version": version,
        "weights_published": f"w{version}",
        "weights_loaded": f"w{version}",
        "reference_fingerprint": "r",
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "kl_coef": 0.05,
        "loss": 0.1,
    }


def spoil(record, fault, seed=0):  # noqa: C901, PLR0911 - one return a fault
    """Return the record with a fault in it."""
    random = np.random.default_rng([seed, record.step, 7])
    num = record.num_tokens
    match fault:
        case "stale":
            return replace(record, logp_sampler=record.logp_sampler + 0.2 * random.normal(size=num))
        case "mask":
            emitted_by = np.where(random.random(num) < 0.2, 1, 0).astype(np.int8)
            return replace(record, emitted_by=emitted_by)
        case "rewards":
            return replace(record, reward=np.full(ROWS, -1.0), advantage=np.zeros(ROWS))
        case "temperature":
            lift = np.float32(0.4) * (record.logp_old + record.entropy)
            return replace(record, logp_sampler=record.logp_old + lift)
        case "shift":
            return replace(record, logp_sampler=np.roll(record.logp_old, 1))
        case "nan":
            facts = {**record.facts, "loss": float("nan"), "grad_norm": float("inf")}
            return replace(record, facts=facts)
        case "groups":
            return replace(record, advantage=random.normal(size=ROWS))
        case "metric":
            logp = record.logp_ref.copy()
            logp[::50] += 9
            return replace(record, logp_ref=logp)
    return record


def metrics_of(record, fault="none", more=0):
    """Return the line of metrics.jsonl for a step."""
    d = record.logp_ref.astype(np.float64) - record.logp_old
    kl = float(np.mean(np.expm1(d) - d)) * (2.0 if fault == "metric" else 1.0)
    line = {"step": record.step, "reward": float(record.reward.mean()), "kl": kl, "loss": 0.0}
    if record.step % 100 == 1:
        line["eval/accuracy"] = 0.5
    return {**line, **{f"m{i}": 1.5 for i in range(more)}}


@dataclass(frozen=True)
class Kind:
    """What the steps of a run are like."""

    make: Callable = whole_record
    fault: str = "none"
    since: int = 1
    """The first step with the fault."""
    more: int = 0
    """Metrics that no check reads."""
    seed: int = 0


def write_run(folder, steps, kind=Kind()):  # noqa: B008 - it is frozen
    """Write a run of so many steps without waiting for the disk, and return its folder."""
    folder.mkdir(parents=True)
    bare = {"eos_ids": [1], "logp_old": "scored"}
    write_run_facts(folder, RUN if kind.make is whole_record else bare)
    write_tokens(folder, {i: f"t{i} " for i in range(VOCABULARY)})
    add_steps(folder, range(1, steps + 1), kind)
    return folder


def add_steps(folder, steps, kind=Kind()):  # noqa: B008 - it is frozen
    """Append steps to a run: records, metrics, and an event in ten."""
    durable = store.write_durably, store.write_atomically
    store.write_durably = store.write_atomically = Path.write_bytes
    lines, events = [], []
    for step in steps:
        fault = kind.fault if step >= kind.since else "none"
        record = spoil(kind.make(step, kind.seed), fault, kind.seed)
        store.write_record(folder, record)
        lines.append(json.dumps(metrics_of(record, fault, kind.more)) + "\n")
        if step % 10 == 0:
            events.append(json.dumps({"step": step, "event": "trouble", "says": "x" * 200}) + "\n")
    store.write_durably, store.write_atomically = durable
    for name, content in (("metrics.jsonl", lines), ("events.jsonl", events)):
        with (folder / name).open("a") as file:
            file.writelines(content)


def repeat_steps(folder, steps, distinct, kind):
    """Go on with the parts of the first steps, over and over: making new ones would take hours."""
    parts = {}
    for step in range(1, distinct + 1):
        manifest = json.loads((store.step_folder(folder, step) / store.MANIFEST).read_text())
        name = manifest["parts"][0]["file"]
        parts[step] = (manifest, (store.step_folder(folder, step) / name).read_bytes())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    with (folder / "metrics.jsonl").open("a") as metrics:
        for step in range(distinct + 1, steps + 1):
            old = (step - 1) % distinct + 1
            manifest, data = {**parts[old][0], "step": step}, parts[old][1]
            if kind.make is whole_record:
                manifest["facts"] = dict(whole_facts(step - 1))
            manifest["digest"] = store.manifest_digest(manifest)
            place = store.step_folder(folder, step)
            place.mkdir()
            (place / manifest["parts"][0]["file"]).write_bytes(data)
            (place / store.MANIFEST).write_text(json.dumps(manifest))
            metrics.write(json.dumps({**json.loads(lines[old - 1]), "step": step}) + "\n")


def timed(*command, env=None):
    """Run a command; return its exit code, seconds, CPU seconds and megabytes of all processes."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
    most = 0
    while process.poll() is None:
        most = max(most, memory_of(process.pid))
        time.sleep(0.2)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return process.returncode, time.monotonic() - begun, cpu, most


def memory_of(pid):
    """Return the megabytes that a process and its children hold, shared pages counted once."""
    total = 0
    for each in {pid, *descendant_pids(pid)}:
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{each}/smaps_rollup").read_text()
            total += int(text.split("Pss:")[1].split()[0])
    return total / 1024


def main():
    """Print what a first look, a second one and a report cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kind", choices=["bare", "whole"], default="bare")
    parser.add_argument("--distinct", type=int, default=2_000, help="steps; others repeat them")
    parser.add_argument("--folder", type=Path, help="keep the run there, or use the one that is")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="klinic-long-") as scratch:
        run = given.folder or Path(scratch) / "run"
        if not run.exists():
            make = bare_record if given.kind == "bare" else whole_record
            kind = Kind(make=make, more=80)
            write_run(run, min(given.steps, given.distinct), kind)
            repeat_steps(run, given.steps, min(given.steps, given.distinct), kind)
            time.sleep(3)  # files that are just written are not taken for finished
        klinic = [sys.executable, "-m", "klinic.cli"]
        env = {**os.environ, "KLINIC_CACHE": f"{scratch}/cache"}
        alone = {**os.environ, "KLINIC_CACHE": f"{scratch}/other"}
        page = f"{scratch}/report.html"
        looks = {
            "diagnose, first look": ([*klinic, "diagnose", str(run)], env),
            "diagnose, second look": ([*klinic, "diagnose", str(run)], env),
            "report, first look": ([*klinic, "report", str(run), "--out", page], alone),
            "report, second look": ([*klinic, "report", str(run), "--out", page], alone),
        }
        sys.stdout.write(f"{given.steps} steps ({given.kind}), load {os.getloadavg()[0]:.1f}\n")
        for name, (command, where) in looks.items():
            code, seconds, cpu, memory = timed(*command, env=where)
            sys.stdout.write(
                f"{name:22} exit {code}  {seconds:6.1f} s  {cpu:6.1f} s CPU  {memory:5.0f} MB\n"
            )
            sys.stdout.flush()
        if Path(page).exists():
            sys.stdout.write(f"page: {Path(page).stat().st_size / 1024:.0f} KB\n")


if __name__ == "__main__":
    main()
