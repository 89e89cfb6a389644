"""Builds the case of each step: its record, a window of earlier records, metrics and probes.

Records are read one at a time, so memory does not grow with the run.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from klinic.checks.base import Case, ProbeEntry
from klinic.errors import EvidenceError
from klinic.evidence import fields, store
from klinic.evidence.facts import fact_from_json, fact_to_json
from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import METRICS, PROBES, RUN_FACTS, SHARED_FORWARD, read_run_facts

WINDOW = 20  # earlier records that a check may read
ENDS = 20  # values of a metric kept from the start of a run, and as many from its end


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """The evidence of a run that checks read, except its records."""

    facts: Mapping[str, Any]
    """run.json."""
    lines: Mapping[int, Mapping[str, Any]]
    """Metrics that checks read, by step, in step order."""
    answers: Mapping[int, Mapping[str, ProbeEntry]]
    """Probe results of a step, by probe name."""


def read_inputs(run: Path) -> RunInputs:
    """Return run.json, the metrics that checks read, and the probe results of a run."""
    answers = {
        step: {a["probe"]: a for a in results if isinstance(a.get("probe"), str)}
        for step, results in entries_by_step(run / PROBES).items()
    }
    return RunInputs(
        facts=read_facts(run),
        lines=_read_judged_metrics(run / METRICS),
        answers=answers,
    )


def read_facts(run: Path) -> Mapping[str, Any]:
    """Return run.json; empty if there is none."""
    return read_run_facts(run) if (run / RUN_FACTS).exists() else {}


def _read_judged_metrics(path: Path) -> dict[int, dict[str, Any]]:
    lines: dict[int, dict[str, Any]] = {}
    for entry in Journal(path).entries():
        step = entry.get("step")
        if isinstance(step, int):
            # the name objects of `fields`, so that 100,000 lines share them
            metrics = {name: entry[name] for name in fields.METRICS if name in entry}
            lines.setdefault(step, {}).update(metrics)
    return dict(sorted(lines.items()))


def recorded_steps(run: Path) -> list[int]:
    """Return the recorded steps of a run, in order; raise `EvidenceError` if there are none."""
    steps = store.complete_steps(run)
    if not steps:
        raise EvidenceError(
            f"{run} has no records, so there is nothing to diagnose. Pass the folder of a run; its "
            "records are in `records/step=...` (output.records_every: 1)."
        )
    return steps


def read_cases(run: Path) -> Iterator[Case]:
    """Yield a case for every recorded step, in order."""
    steps = recorded_steps(run)
    inputs = read_inputs(run)
    yield from build_cases(run, steps, inputs, CaseBuilder(inputs.facts))


def build_cases(
    run: Path, steps: Sequence[int], inputs: RunInputs, cases: "CaseBuilder"
) -> Iterator[Case]:
    """Yield the cases of some steps, each with the metrics up to that step."""
    lines = deque(inputs.lines.items())
    for step in steps:
        while lines and lines[0][0] <= step:
            cases.add_metrics(*lines.popleft())
        yield cases.next_case(store.read_record(run, step), inputs.answers.get(step, {}))


class MetricHistory:
    """The metrics available to a case: those of the first and of the last steps."""

    def __init__(self) -> None:
        self.lines: dict[int, dict[str, Any]] = {}
        self._steps_by_metric: dict[str, list[int]] = {}  # steps of each metric

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step that checks read; evaluations are merged into their step."""
        for name in [name for name in fields.METRICS if name in metrics]:
            self.lines.setdefault(step, {})[name] = metrics[name]
            self._keep_ends(name, step)

    def copy(self) -> "MetricHistory":
        """Return an independent copy."""
        copied = MetricHistory()
        copied.lines = {step: dict(line) for step, line in self.lines.items()}
        copied._steps_by_metric = {
            name: list(steps) for name, steps in self._steps_by_metric.items()
        }
        return copied

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values, for `restore`."""
        return {
            "metrics": {
                str(step): {name: fact_to_json(value) for name, value in line.items()}
                for step, line in self.lines.items()
            },
            "told": {name: list(steps) for name, steps in self._steps_by_metric.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.lines = {
            int(step): {name: fact_from_json(value) for name, value in line.items()}
            for step, line in state["metrics"].items()
        }
        self._steps_by_metric = {name: list(steps) for name, steps in state["told"].items()}

    def _keep_ends(self, name: str, step: int) -> None:
        """Drop a metric's values in the middle of a run, which may train for weeks.

        Counted per metric, because evaluations are rarer than rewards.
        """
        steps = self._steps_by_metric.setdefault(name, [])
        if step not in steps:
            steps.append(step)
        if len(steps) > 2 * ENDS:
            line = self.lines[middle := steps.pop(ENDS)]
            del line[name]
            if not line:
                del self.lines[middle]


class CaseBuilder:
    """Builds cases in step order, for a run in training or on disk."""

    def __init__(self, facts: Mapping[str, Any], metrics: MetricHistory | None = None) -> None:
        self._facts = facts
        self._metrics = MetricHistory() if metrics is None else metrics
        self._earlier: deque[StepRecord] = deque(maxlen=WINDOW)
        self._start: StepRecord | None = None
        self._measured: dict[Any, tuple[StepRecord, Any]] = {}

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step."""
        self._metrics.add_metrics(step, metrics)

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`: the metrics and the steps of `records`."""
        return {**self._metrics.state(), "window": [record.step for record in self.records]}

    @property
    def records(self) -> list[StepRecord]:
        """The earlier records of the next case, the oldest first."""
        start = self._start
        older = [] if start is None or any(r is start for r in self._earlier) else [start]
        return [*older, *self._earlier]

    def restore(self, state: Mapping[str, Any], records: Iterable[StepRecord]) -> None:
        """Restore the result of `state`, with the records of its window."""
        self._metrics.restore(state)
        for record in records:
            self.add_record(record)

    def add_record(self, record: StepRecord) -> None:
        """Add a record to the window without judging it."""
        record = fill_logp_old(record, self._facts)
        if record.facts.get("learner_version") == 0:
            self._start = record
        self._earlier.append(record)

    def next_case(
        self,
        record: StepRecord,
        answers: Mapping[str, ProbeEntry],
        metrics: Mapping[str, Any] | None = None,
    ) -> Case:
        """Return the case of a step; its metrics may have been added before."""
        if metrics is not None:
            self.add_metrics(record.step, metrics)
        earlier = tuple(self._earlier)
        self._drop_stale_measurements()
        self.add_record(record)
        return Case(
            record=self._earlier[-1],
            earlier=earlier,
            start=self._start,
            run=self._facts,
            metrics=self._metrics.lines,
            probe_results=answers,
            measure_cache=self._measured,
        )

    def _drop_stale_measurements(self) -> None:
        """Drop cached measurements of records outside the window."""
        live_ids = {id(record) for record in (*self._earlier, self._start)}
        for key in [key for key in self._measured if key[1] not in live_ids]:
            del self._measured[key]


def fill_logp_old(record: StepRecord, facts: Mapping[str, Any]) -> StepRecord:
    """Fill in `logp_old` if run.json states that one forward pass serves both."""
    shared = facts.get("logp_old") == SHARED_FORWARD
    if record.logp_old is None and record.logp is not None and shared:
        return replace(record, logp_old=record.logp)
    return record


def entries_by_step(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the entries of a journal by step."""
    entries: dict[int, list[dict[str, Any]]] = {}
    for entry in Journal(path).entries():
        if isinstance(entry.get("step"), int):
            entries.setdefault(entry["step"], []).append(entry)
    return entries


def merge_entries(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the entries of a step, such as its metrics and its evaluation."""
    return {name: value for line in lines for name, value in line.items()}
