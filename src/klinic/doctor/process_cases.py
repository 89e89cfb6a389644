"""Judges the rows of each process alone: a fault of one rank is diluted among the rows of all.

Only checks of single tokens are repeated, since rewards, losses and gradients belong to the whole
step. A failure counts if another process does not show it: else the whole step would.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage
from klinic.evidence.processes import split_by_process
from klinic.evidence.record import StepRecord
from klinic.evidence.verdict import Verdict

TOKEN_STAGES = (Stage.ALIGNMENT, Stage.SAMPLER, Stage.REFERENCE)
MIN_TOKENS = 50  # trained tokens of a process; fewer are judged with those of the others
MAX_PROCESSES = 64  # processes that are judged alone


class ProcessCases:
    """Splits cases by process; records are split once, while cases contain them."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[StepRecord, dict[int, StepRecord]]] = {}
        self._measured: dict[int, dict[object, tuple[StepRecord, object]]] = {}

    def split(self, case: Case) -> dict[int, Case]:
        """Return the case of each process with enough tokens; empty for a single process."""
        process = case.record.process
        if process is None or not 1 < len(np.unique(process)) <= MAX_PROCESSES:
            return {}
        records = [r for r in (*case.earlier, case.record, case.start) if r is not None]
        self._parts = {id(r): self._parts.get(id(r)) or (r, split_by_process(r)) for r in records}
        ranks = [n for n, part in self._rows(case.record).items() if _has_enough_tokens(part)]
        return {rank: self._case_of(case, rank) for rank in ranks}

    def _rows(self, record: StepRecord) -> dict[int, StepRecord]:
        return self._parts[id(record)][1]

    def _case_of(self, case: Case, rank: int) -> Case:
        earlier = tuple(self._rows(r)[rank] for r in case.earlier if rank in self._rows(r))
        start = None if case.start is None else self._rows(case.start).get(rank)
        live = {id(r) for r in (*earlier, start)}
        known = self._measured.get(rank, {})
        self._measured[rank] = {k: v for k, v in known.items() if id(v[0]) in live}
        return replace(
            case,
            record=self._rows(case.record)[rank],
            earlier=earlier,
            start=start,
            measure_cache=self._measured[rank],
        )


def judge_processes(
    check: Check,
    whole: Finding,
    cases: dict[int, Case],
    run_check: Callable[[Check, Case], Finding],
) -> Finding:
    """Return the finding of the whole step, or that of the first process that fails alone."""
    if len(cases) < 2 or whole.verdict is Verdict.FAIL or check.stage not in TOKEN_STAGES:
        return whole
    findings = {rank: run_check(check, case) for rank, case in cases.items()}
    failed = [rank for rank, finding in findings.items() if finding.verdict is Verdict.FAIL]
    if not failed or len(failed) == len(findings):
        return whole
    finding = findings[failed[0]]
    others = ", ".join(map(str, failed))
    return replace(
        finding,
        summary=f"in the rows of process {others} of {len(findings)} alone: {finding.summary}",
        measured={**finding.measured, "process": float(failed[0])},
    )


def _has_enough_tokens(record: StepRecord) -> bool:
    return int(record.loss_mask.sum()) >= MIN_TOKENS
