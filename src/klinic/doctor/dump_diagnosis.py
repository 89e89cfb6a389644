"""Diagnoses the batch dump of another trainer, joined with its scalar log by step."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from klinic.checks import CHECKS
from klinic.checks.base import Case
from klinic.doctor.cases import CaseBuilder
from klinic.doctor.diagnosis import Diagnosis, Examination
from klinic.doctor.scalars.examine import ScalarDiagnosis, examine_log
from klinic.errors import EvidenceError
from klinic.evidence.readers.dumps.advantage_kind import identify_advantage
from klinic.evidence.readers.dumps.token_dump import TokenDump
from klinic.evidence.readers.log import ScalarLog
from klinic.evidence.record import StepRecord

JOINED = ("grad_norm", "learning_rate")
"""Scalars that become facts of a step. A KL is not joined: every trainer averages it otherwise."""
STRUCTURE = ("step", "row_offsets", "prompt_offsets", "facts", "reward_parts")


@dataclass(slots=True, kw_only=True)
class DumpContents:
    """What was read from a dump."""

    facts: dict[str, Any]
    """The run.json keys: those of the format, and the advantage estimator if one fits."""
    steps: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """The record fields of the first step."""
    joined: list[str] = field(default_factory=list)
    """The scalars that were joined."""

    def add_record(self, record: StepRecord) -> None:
        """Count a step."""
        if not self.steps:
            self.names = [
                f.name
                for f in fields(record)
                if f.name not in STRUCTURE and getattr(record, f.name) is not None
            ]
        self.steps.append(record.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpDiagnosis:
    """The diagnosis of a dump, and that of the scalar log found with it."""

    dump: TokenDump
    contents: DumpContents
    records: Diagnosis
    scalars: ScalarDiagnosis | None

    @property
    def sick(self) -> bool:
        """Whether a check of the records or a sign of the scalars failed."""
        return self.records.sick or (self.scalars is not None and self.scalars.sick)

    @property
    def is_of_scalars(self) -> bool:
        """Whether the scalars show a fault, and the records name no cause."""
        is_of_records = self.records.first_cause is not None
        return self.scalars is not None and self.scalars.sick and not is_of_records

    @property
    def num_decided(self) -> int:
        """Number of checks that had the evidence they need in some step."""
        return sum(bool(hypothesis.num_judged) for hypothesis in self.records.hypotheses)


def diagnose_dump(
    dump: TokenDump, log: ScalarLog | None, progress: Callable[[int, int], object]
) -> DumpDiagnosis:
    """Run every check on every step; one step is in memory at a time, with 20 before it."""
    contents = DumpContents(facts=dict(dump.facts))
    examination = Examination(CHECKS)
    with np.errstate(all="ignore"):  # a dump may hold any value
        for case in dump_cases(dump, log, contents):
            examination.add_case(case)
            progress(len(contents.steps), max(dump.num_files, len(contents.steps)))
    if not contents.steps:
        raise EvidenceError(f"{dump.path}: has no completions. Pass a folder of a run that has.")
    return DumpDiagnosis(
        dump=dump,
        contents=contents,
        records=examination.conclude(),
        scalars=None if log is None else examine_log(log),
    )


def dump_cases(
    dump: TokenDump, log: ScalarLog | None = None, contents: DumpContents | None = None
) -> Iterator[Case]:
    """Yield a case for every step of a dump, with the scalars of the same step."""
    contents = DumpContents(facts=dict(dump.facts)) if contents is None else contents
    cases = CaseBuilder(contents.facts)
    scalars = scalars_by_step(log)
    for record in dump.read_records():
        if "advantage" not in contents.facts and (kind := identify_advantage(record)):
            contents.facts["advantage"] = kind
        values = scalars.get(record.step, {})
        contents.joined = list(dict.fromkeys([*contents.joined, *values]))
        contents.add_record(record)
        joined = replace(record, facts={**values, **record.facts})
        yield cases.next_case(joined, {}, {n: v for n, v in values.items() if n == "grad_norm"})


def scalars_by_step(log: ScalarLog | None) -> Mapping[int, Mapping[str, float]]:
    """Return the scalars to join; empty if an entry of the log is not of one numbered step."""
    if log is None or log.steps_are_counted or log.log_interval != 1:
        return {}
    columns = {name: log.columns[name] for name in JOINED if name in log.columns}
    return {
        step: {n: value for n, column in columns.items() if (value := column[index]) is not None}
        for index, step in enumerate(log.steps)
    }
