"""Reads verl's completions (`trainer.rollout_data_dir`): STEP.jsonl, one line per completion.

A line has `input`, `output`, `score` and `step`; lines with the same input form a group. The log
has the reward, its standard deviation, the fraction of groups with equal rewards, and the fraction
of completions that repeat another of their group.
"""

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from klinic.errors import EvidenceError
from klinic.evidence.files import LONGEST, Journal
from klinic.evidence.readers.json_lines import first_entry
from klinic.evidence.readers.log import LogBuilder, ScalarLog, parse_number
from klinic.evidence.readers.names import ROLLOUTS
from klinic.evidence.readers.trainer_state import list_folder

FILE = re.compile(r"([0-9]{1,15})\.jsonl")
REQUIRED_KEYS = {"input", "output", "score"}


def is_rollouts(path: Path) -> bool:
    """Whether a file holds completions with scores."""
    return first_entry(path).keys() >= REQUIRED_KEYS


def find_rollouts(folder: Path) -> tuple[Path, ...]:
    """Return the rollout files of a folder, ordered by step."""
    numbered_files = sorted(
        (int(m[1]), p) for p in list_folder(folder) if (m := FILE.fullmatch(p.name))
    )
    return (
        tuple(path for _, path in numbered_files)
        if numbered_files and is_rollouts(numbered_files[0][1])
        else ()
    )


def read_log(paths: tuple[Path, ...]) -> ScalarLog:
    """Return the metrics of the completions of each step as a scalar log."""
    builder = LogBuilder()
    for path in paths:
        rows = [
            _parse_row(entry, path, line)
            for line, entry in enumerate(Journal(path, longest=LONGEST).entries(), 1)
        ]
        steps = defaultdict(list)
        for row in rows:
            steps[row["step"]].append(row)
        for step, step_rows in steps.items():
            builder.add(step, rollout_metrics(step_rows))
    return builder.build_log(format="Rollouts", files=paths, recognise=lambda _: ROLLOUTS)


def _parse_row(entry: dict[str, Any], path: Path, line: int) -> dict[str, Any]:
    score = parse_number(entry.get("score", "none"))
    if not isinstance(entry.get("input"), str) or score is None:
        raise EvidenceError(
            f"{path}, line {line}: needs `input`, a text, and `score`, a number. Pass the folder "
            "of trainer.rollout_data_dir."
        )
    named = FILE.fullmatch(path.name)
    step = entry.get("step", int(named[1]) if named else None)
    if isinstance(step, list | dict):
        raise EvidenceError(f"{path}, line {line}: `step` is not a number. Write it as one.")
    return {**entry, "score": score, "step": step}


def rollout_metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of a step's completions."""
    scores = [row["score"] for row in rows if math.isfinite(row["score"])]
    groups = defaultdict(list)
    for row in rows:
        groups[row["input"]].append(row)
    compared = [group for group in groups.values() if len(group) > 1]
    metrics = {"reward": mean(scores) if scores else math.nan}
    if len(scores) > 1:
        metrics["reward_std"] = math.sqrt(mean([square(s - metrics["reward"]) for s in scores]))
    if compared:
        same = [len({row["score"] for row in group}) == 1 for group in compared]
        repeat_fractions = [
            1 - len({str(row.get("output")) for row in g}) / len(g) for g in compared
        ]
        metrics["frac_reward_zero_std"] = mean([float(equal) for equal in same])
        metrics["completions/equal_ratio"] = mean(repeat_fractions)
    return metrics


def mean(values: list[float]) -> float:
    """Return the mean of a non-empty list."""
    return sum(values) / len(values)  # not fsum, which raises on overflow


def square(value: float) -> float:
    """Return the square; infinity on overflow, where `**` raises."""
    return value * value
