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
from klinic.doctor.cases import WINDOW, CaseBuilder, MetricHistory, RunInputs, build_cases
from klinic.doctor.diagnosis import Examination
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
    inputs: RunInputs
    """With the metrics and probe results of these steps only."""
    metrics: MetricHistory
    """Metrics of earlier steps."""

    def without_first(self, num: int) -> "Segment":
        """Return the segment without its first `num` steps."""
        metrics = self.metrics.copy()
        lines = list(self.inputs.lines.items())
        for step, line in lines:
            if step <= self.steps[num - 1]:
                metrics.add_metrics(step, line)
        left = {step: line for step, line in lines if step > self.steps[num - 1]}
        return replace(
            self,
            steps=self.steps[num:],
            before=_window_before((*self.before, *self.steps[:num]), self.starts),
            inputs=replace(self.inputs, lines=left),
            metrics=metrics,
        )


def group_steps(steps: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield (segment number, steps) of each segment.

    >>> [(number, len(steps)) for number, steps in group_steps(range(1, 1201))]
    [(0, 499), (1, 500), (2, 201)]
    """
    for number, group in groupby(steps, key=lambda step: step // LENGTH):
        yield number, list(group)


def split_run(
    run: Path, steps: Sequence[int], inputs: RunInputs, starts: frozenset[int]
) -> list[Segment]:
    """Split a run into segments."""
    metrics, lines = MetricHistory(), deque(inputs.lines.items())
    before: tuple[int, ...] = ()
    segments = []
    for _, group in group_steps(steps):
        now = tuple(group)
        segment_lines = {}
        while lines and lines[0][0] <= now[-1]:
            step, line = lines.popleft()
            segment_lines[step] = line
        answers = {step: inputs.answers[step] for step in now if step in inputs.answers}
        segments.append(
            Segment(
                run=run,
                steps=now,
                before=before,
                starts=starts.intersection((*before, *now)),
                inputs=RunInputs(facts=inputs.facts, lines=segment_lines, answers=answers),
                metrics=metrics.copy(),
            )
        )
        before = _window_before((*before, *now), starts)
        for step, line in segment_lines.items():
            metrics.add_metrics(step, line)
    return segments


def _window_before(steps: Sequence[int], starts: frozenset[int]) -> tuple[int, ...]:
    """Return the earlier steps that checks of the next segment may read, in order."""
    start = next((step for step in reversed(steps) if step in starts), None)
    window = tuple(steps[-WINDOW:])
    return window if start is None or start in window else (start, *window)


def cache_keys(segment: Segment, digests: Mapping[int, str], version: str) -> list[str]:
    """Return for each step a digest of all inputs of the findings up to it."""
    digest = hashlib.sha256()

    def add_json(value: Any) -> None:
        digest.update(json.dumps(value, sort_keys=True).encode() + b"\n")

    add_json([version, WINDOW, segment.inputs.facts, segment.metrics.lines])
    add_json([digests[step] for step in segment.before])
    lines, keys = deque(segment.inputs.lines.items()), []
    for step in segment.steps:
        new_lines = []
        while lines and lines[0][0] <= step:
            new_lines.append(lines.popleft())
        add_json([step, digests[step], new_lines, segment.inputs.answers.get(step)])
        keys.append(digest.hexdigest())
    return keys


def judge_segment(segment: Segment, checks: Sequence[Check]) -> Examination:
    """Run every check on the steps of a segment."""
    cases = CaseBuilder(segment.inputs.facts, segment.metrics.copy())
    for step in segment.before:
        cases.add_record(store.read_record(segment.run, step))
    examination = Examination(checks)
    for case in build_cases(segment.run, segment.steps, segment.inputs, cases):
        examination.add_case(case)
    return examination


def to_json_values(examination: Examination) -> dict[str, Any]:
    """Return an examination as JSON values."""
    return {"absent": sorted(examination.missing_fields), "hypotheses": examination.state()}


def from_json_values(value: Any, checks: Sequence[Check]) -> Examination | None:
    """Return an examination from JSON values; None if they are not one by these checks."""
    examination = Examination(checks)
    try:
        if value["hypotheses"].keys() != {check.name for check in checks}:
            return None
        examination.restore(value["hypotheses"])
        examination.missing_fields = frozenset(value["absent"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return examination
