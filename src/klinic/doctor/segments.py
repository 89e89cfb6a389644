"""Segments of a run: consecutive steps with all inputs of their findings, judged as one unit."""

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from klinic.checks.base import Check
from klinic.doctor.diagnosis import Examination
from klinic.doctor.reading import WINDOW, Cases, Inputs, KeptMetrics, cases_of
from klinic.evidence import store

LENGTH = 500  # steps, at fixed boundaries: a new step changes no other segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps to judge, and the other evidence that checks may read."""

    run: Path
    steps: tuple[int, ...]
    before: tuple[int, ...]
    """Earlier steps whose records checks may read: a window, and the latest start."""
    starts: frozenset[int]
    """Of `steps` and `before`, those that no update precedes."""
    inputs: Inputs
    """With the metrics and probe results of these steps only."""
    kept: KeptMetrics
    """Metrics of earlier steps."""

    def behind(self, num: int) -> "Segment":
        """Return the segment without its first `num` steps."""
        kept = self.kept.copy()
        lines = list(self.inputs.lines.items())
        for step, line in lines:
            if step <= self.steps[num - 1]:
                kept.tell(step, line)
        left = {step: line for step, line in lines if step > self.steps[num - 1]}
        return replace(
            self,
            steps=self.steps[num:],
            before=_seen_from((*self.before, *self.steps[:num]), self.starts),
            inputs=replace(self.inputs, lines=left),
            kept=kept,
        )


def group_steps(steps: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield (segment number, steps) of each segment.

    >>> [(number, len(steps)) for number, steps in group_steps(range(1, 1201))]
    [(0, 499), (1, 500), (2, 201)]
    """
    for number, group in groupby(steps, key=lambda step: step // LENGTH):
        yield number, list(group)


def cut(run: Path, steps: Sequence[int], inputs: Inputs, starts: frozenset[int]) -> list[Segment]:
    """Split a run into segments."""
    kept, lines = KeptMetrics(), deque(inputs.lines.items())
    before: tuple[int, ...] = ()
    segments = []
    for _, group in group_steps(steps):
        now = tuple(group)
        told = {}
        while lines and lines[0][0] <= now[-1]:
            step, line = lines.popleft()
            told[step] = line
        answers = {step: inputs.answers[step] for step in now if step in inputs.answers}
        segments.append(
            Segment(
                run=run,
                steps=now,
                before=before,
                starts=starts.intersection((*before, *now)),
                inputs=Inputs(facts=inputs.facts, lines=told, answers=answers),
                kept=kept.copy(),
            )
        )
        before = _seen_from((*before, *now), starts)
        for step, line in told.items():
            kept.tell(step, line)
    return segments


def _seen_from(steps: Sequence[int], starts: frozenset[int]) -> tuple[int, ...]:
    """Return the earlier steps that checks of the next segment may read, in order."""
    start = next((step for step in reversed(steps) if step in starts), None)
    window = tuple(steps[-WINDOW:])
    return window if start is None or start in window else (start, *window)


def keys_of(segment: Segment, digests: Mapping[int, str], version: str) -> list[str]:
    """Return for each step a digest of all inputs of the findings up to it."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        digest.update(json.dumps(value, sort_keys=True).encode() + b"\n")

    add([version, WINDOW, segment.inputs.facts, segment.kept.lines])
    add([digests[step] for step in segment.before])
    lines, keys = deque(segment.inputs.lines.items()), []
    for step in segment.steps:
        told = []
        while lines and lines[0][0] <= step:
            told.append(lines.popleft())
        add([step, digests[step], told, segment.inputs.answers.get(step)])
        keys.append(digest.hexdigest())
    return keys


def judge(segment: Segment, checks: Sequence[Check]) -> Examination:
    """Run every check on the steps of a segment."""
    cases = Cases(segment.inputs.facts, segment.kept.copy())
    for step in segment.before:
        cases.remember(store.read_record(segment.run, step))
    examination = Examination(checks)
    for case in cases_of(segment.run, segment.steps, segment.inputs, cases):
        examination.hear(case)
    return examination


def to_plain(examination: Examination) -> dict[str, Any]:
    """Return an examination as JSON values."""
    return {"absent": sorted(examination.absent), "hypotheses": examination.state()}


def from_plain(value: Any, checks: Sequence[Check]) -> Examination | None:
    """Return an examination from JSON values; None if they are not one by these checks."""
    examination = Examination(checks)
    try:
        if value["hypotheses"].keys() != {check.name for check in checks}:
            return None
        examination.restore(value["hypotheses"])
        examination.absent = frozenset(value["absent"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return examination
