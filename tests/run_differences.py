"""Compare everything that two runs left on disk, byte for byte: weights, records, probes, events.

Left out is what says when and where a run was made, and nothing else: timings, the path of the
run, the lock, TensorBoard's files (their names hold the time), and events about being killed.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOT_COMPARED = (".lock", "tensorboard/", "vllm.log")
OF_THE_NEWEST = ("recipe.yaml", "diagnosis.json", "recovery.json")
OF_A_KILL = ("resumed", "resumed rollback", "restarted", "stopped", "broken checkpoint")


@dataclass(frozen=True, kw_only=True)
class Part:
    """What to compare of two runs that go on: steps so far, checkpoints of a schedule."""

    until: int
    saved_every: int
    """Steps; a run that was stopped has checkpoints in between."""


def evidence_differences(one: Path, other: Path, part: Part | None = None) -> list[str]:
    """Return what differs between two runs, or in a part: nothing, if they are one run."""
    a, b = files_of(one, part), files_of(other, part)
    lonely = [f"{name}: only in {one.parent.name}" for name in sorted(a - b)]
    lonely += [f"{name}: only in {other.parent.name}" for name in sorted(b - a)]
    differ = [n for n in sorted(a & b) if content(one, n, part) != content(other, n, part)]
    return lonely + differ


def files_of(run: Path, part: Part | None) -> set[str]:
    """Return the files of a run that are compared."""
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    return {name for name in names if _is_compared(name, part)}


def _is_compared(name: str, part: Part | None) -> bool:
    if name.startswith(NOT_COMPARED):
        return False
    if name.startswith("checkpoints/") and name.endswith("/manifest.json"):
        return False  # it holds digests of files that name the run's path
    if part is None:
        return True
    if name in OF_THE_NEWEST:
        return False
    found = re.search(r"/step=(\d+)", name)
    step = 0 if found is None else int(found[1])
    every = part.saved_every if name.startswith("checkpoints/") else 1
    return step <= part.until and step % every == 0


def content(run: Path, name: str, part: Part | None) -> bytes | list[str]:
    """Return what is compared of a file."""
    data = (run / name).read_bytes().replace(str(run).encode(), b"RUN")
    if name == "metrics.jsonl":
        return [_without_time(entry) for entry in _entries(data, part)]
    if name == "events.jsonl":
        # those that outlive a rollback stand before others that were made again
        events = [e for e in _entries(data, part) if e["event"] not in OF_A_KILL]
        return sorted(json.dumps(event) for event in events)
    if name == "probes.jsonl":
        return [json.dumps(entry) for entry in _entries(data, part)]
    if name == "run.json":
        return json.dumps({**json.loads(data), "created": None}).encode()
    return data


def _entries(data: bytes, part: Part | None) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in data.splitlines()]
    return [e for e in entries if part is None or e.get("step", 0) <= part.until]


def _without_time(metrics: dict[str, Any]) -> str:
    return json.dumps({name: v for name, v in metrics.items() if not name.startswith("time/")})
