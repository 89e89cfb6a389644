"""Runs the checks on a finished step in a background thread while the next one trains.

Records are immutable by then. The diagnosis of a step is collected when the next step finishes, so
the result does not depend on thread timing. A check that raises finds nothing; no failure here
reaches the training.

`RunDoctor` connects the doctor to a run: probe schedule, reported causes, and whether to stop.
Probes run after 1, 2, 4, 8, ... steps: faults show early or late, and long runs pay little.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from klinic.checks import CHECKS, sampler_sync
from klinic.checks.base import Check, ProbeEntry
from klinic.doctor.cases import WINDOW, CaseBuilder
from klinic.doctor.diagnosis import Examination
from klinic.errors import EvidenceError, RunStoppedError
from klinic.evidence import store
from klinic.evidence.files import json_bytes, read_json
from klinic.evidence.record import Fact, StepRecord
from klinic.evidence.run_facts import DIAGNOSIS, read_run_facts
from klinic.evidence.verdict import RunVerdict
from klinic.evidence.writing import write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDiagnosis:
    """The conclusion of the checks after a step."""

    failed: int
    """Number of checks that have failed so far."""
    cause: str | None
    sentence: str
    diagnosis: dict[str, Any]
    """The contents of diagnosis.json; empty if the cause is not new."""
    is_certain: bool = True
    """Whether the cause is stated, not only likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorCheckpoint:
    """The doctor's part of a checkpoint: its state, and the folder with records of its window."""

    state: Mapping[str, Any]
    folder: Path

    def read_window(self, run: Path) -> Iterator[StepRecord]:
        """Yield the records of the doctor's window; damaged ones are skipped."""
        for step in self.state["cases"]["window"]:
            with contextlib.suppress(EvidenceError, OSError):  # the doctor works with fewer records
                yield store.read_record(run if store.has_record(run, step) else self.folder, step)


class LiveDoctor:
    """An incremental examination of every step, which reports new causes."""

    def __init__(
        self,
        folder: Path,
        checks: Sequence[Check] = CHECKS,
        *,
        select: Callable[[StepRecord], StepRecord] | None = None,
    ) -> None:
        """Take the checks; `select` takes from a record on disk the rows that were submitted."""
        self._folder = folder
        self._select = select or (lambda record: record)
        self._checks = checks
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klinic-doctor")
        self._pending: Future[StepDiagnosis] | None = None
        self._num_failed = 0
        self._last_cause: str | None = None
        self._was_certain = False
        self._last_diagnosis: dict[str, Any] | None = None
        self.has_new_failure = False
        """Whether a check failed for the first time: a reason to run the probes again."""
        self._start_examination()

    def _start_examination(self) -> None:
        self._cases = CaseBuilder(read_run_facts(self._folder))
        self._examination = Examination(self._checks)

    def restart_after(self, after: int) -> None:
        """Discard all findings: the run continues after an earlier step."""
        self.collect_diagnosis()
        self._start_examination()
        self._num_failed, self._last_cause, self._last_diagnosis = 0, None, None
        self._was_certain = False
        self._delete_diagnosis_after(after)
        with contextlib.suppress(EvidenceError, OSError):  # the doctor works with fewer records
            steps = store.complete_steps(self._folder)
            for step in dict.fromkeys([*steps[:1], *steps[-WINDOW:]]):
                self._cases.add_record(self._select(store.read_record(self._folder, step)))

    @property
    def first_failures(self) -> list[int]:
        """The steps in which a check failed first."""
        firsts = {h.first_step for h in self._examination.hypotheses}
        return sorted(step for step in firsts if step is not None)

    def save(self, folder: Path) -> dict[str, Any] | None:
        """Return the state for a checkpoint after pending checks; None if that fails.

        Records of the window that the run does not keep are written to the checkpoint's folder.
        """
        try:
            state = self._pool.submit(self._build_state, folder).result()
            json_bytes(state)
        except OSError:  # a full disk must abort the save
            raise
        except Exception:  # state that JSON cannot hold must not end a run
            return None
        return state

    def _build_state(self, folder: Path) -> dict[str, Any]:
        for record in self._cases.records:
            if not store.has_record(self._folder, record.step):
                store.write_record(folder, record)
        return {
            "examination": self._examination.state(),
            "cases": self._cases.state(),
            "failed": self._num_failed,
            "cause": self._last_cause,
            "certain": self._was_certain,
            "curious": self.has_new_failure,
            "pending": None if self._pending is None else _pending_state(self._pending),
            "diagnosis": self._last_diagnosis,
        }

    def restore(self, saved: DoctorCheckpoint) -> None:
        """Restore the state of a checkpoint exactly."""
        self.collect_diagnosis()
        self._start_examination()
        state = saved.state
        self._examination.restore(state["examination"])
        window = (self._select(record) for record in saved.read_window(self._folder))
        self._cases.restore(state["cases"], window)
        self._num_failed, self._last_cause, self.has_new_failure = (
            state["failed"],
            state["cause"],
            state["curious"],
        )
        self._was_certain = state.get("certain", True)
        self._pending = _restore_pending(state["pending"])
        self._write_diagnosis(state["diagnosis"])

    def _write_diagnosis(self, diagnosis: dict[str, Any] | None) -> None:
        """Make diagnosis.json hold the given diagnosis, or remove it."""
        self._last_diagnosis = diagnosis
        path = self._folder / DIAGNOSIS
        with contextlib.suppress(OSError):  # the run itself reports a full disk
            if diagnosis is None:
                path.unlink(missing_ok=True)
            else:
                write_atomically(path, json_bytes(diagnosis) + b"\n")

    def _delete_diagnosis_after(self, step: int) -> None:
        """Delete a diagnosis of steps that were rolled back."""
        path = self._folder / DIAGNOSIS
        with contextlib.suppress(EvidenceError, OSError):
            first = read_json(path).get("first_step")
            if isinstance(first, int) and first > step:
                path.unlink()

    def submit_step(
        self,
        record: StepRecord,
        metrics: Mapping[str, Any],
        probe_results: Mapping[str, ProbeEntry],
    ) -> None:
        """Submit a finished step to the checks."""
        self._pending = self._pool.submit(self._diagnose_step, record, dict(metrics), probe_results)

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics of a step, such as those of an evaluation, after pending checks."""
        self._pool.submit(self._cases.add_metrics, step, dict(metrics))

    def _diagnose_step(
        self,
        record: StepRecord,
        metrics: Mapping[str, Any],
        probe_results: Mapping[str, ProbeEntry],
    ) -> StepDiagnosis:
        self._examination.add_case(self._cases.next_case(record, probe_results, metrics))
        diagnosis = self._examination.conclude()
        is_certain = diagnosis.verdict is RunVerdict.CAUSE
        is_new = self._is_new(diagnosis.cause, is_certain=is_certain)
        return StepDiagnosis(
            failed=len(self._examination.failed_checks),
            cause=diagnosis.cause,
            sentence=diagnosis.sentence if is_new else "",
            diagnosis=diagnosis.to_json() if is_new else {},
            is_certain=is_certain,
        )

    def _is_new(self, cause: str | None, *, is_certain: bool) -> bool:
        """Whether a cause differs from the last one, or is now certain."""
        if cause is None:
            return False
        return cause != self._last_cause or (is_certain and not self._was_certain)

    def collect_diagnosis(self) -> StepDiagnosis | None:
        """Return the diagnosis of the last submitted step if its cause is new or now certain."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        try:
            diagnosis = pending.result()
        except Exception:  # a failing check must not end a run
            return None
        self.has_new_failure = diagnosis.failed > self._num_failed
        self._num_failed = diagnosis.failed
        if not self._is_new(diagnosis.cause, is_certain=diagnosis.is_certain):
            return None
        self._last_cause, self._was_certain = diagnosis.cause, diagnosis.is_certain
        self._write_diagnosis(diagnosis.diagnosis)
        return diagnosis

    def close(self) -> None:
        """Wait for pending checks."""
        self._pool.shutdown(wait=True)


def _pending_state(pending: "Future[StepDiagnosis]") -> dict[str, Any] | None:
    """Return a diagnosis that has not been collected yet; None if it failed."""
    try:
        return asdict(pending.result())
    except Exception:  # no diagnosis, as in `collect_diagnosis`
        return None


def _restore_pending(state: Mapping[str, Any] | None) -> "Future[StepDiagnosis] | None":
    if state is None:
        return None
    pending: Future[StepDiagnosis] = Future()
    pending.set_result(StepDiagnosis(**state))
    return pending


DIAGNOSIS_EVENT = "diagnosis"


def is_probe_due(step: int) -> bool:
    """Whether a step is one of 1, 2, 4, 8, ...

    >>> [step for step in range(1, 20) if is_probe_due(step)]
    [1, 2, 4, 8, 16]
    """
    return step & (step - 1) == 0


class RunDoctor:
    """Reports each diagnosed cause once; in the mode `stop`, a certain one stops the run."""

    def __init__(
        self,
        folder: Path,
        action: Literal["none", "tell", "stop"],
        record_event: Callable[[int, str, str, Mapping[str, Fact]], None],
        *,
        display_folder: Path,
        select: Callable[[StepRecord], StepRecord] | None = None,
    ) -> None:
        """Take what `LiveDoctor` needs, and what to do with a cause."""
        self._folder = folder
        self._select = select
        self._display_folder = display_folder
        self._action = action
        self._record_event = record_event
        self._doctor: LiveDoctor | None = None
        self._reported_causes: set[str] = set()

    @property
    def is_enabled(self) -> bool:
        """Whether the recipe enables the live doctor."""
        return self._action != "none"

    def start_after(self, *, after: int, saved: DoctorCheckpoint | None = None) -> None:
        """Start checking the steps after `after`; requires run.json."""
        if not self.is_enabled:
            return
        self._doctor = LiveDoctor(self._folder, select=self._select)
        if after or saved is not None:
            self.restart_after(after, saved)

    def save(self, folder: Path) -> dict[str, Any] | None:
        """Return the state for a checkpoint, from which `restart_after` continues exactly."""
        state = None if self._doctor is None else self._doctor.save(folder)
        return None if state is None else {"named": sorted(self._reported_causes), **state}

    def first_failures(self) -> list[int]:
        """Return the steps in which checks failed first: the evidence of causes."""
        return [] if self._doctor is None else self._doctor.first_failures

    def close(self) -> None:
        """Wait for pending checks."""
        if self._doctor is not None:
            self._doctor.close()

    def restart_after(self, after: int, saved: DoctorCheckpoint | None) -> None:
        """Roll back to an earlier step: restore the saved state, or clear the reported causes."""
        self._reported_causes = set() if saved is None else set(saved.state["named"])
        if self._doctor is None:
            return
        if saved is None:  # the checkpoint has no doctor state
            self._doctor.restart_after(after)
        else:
            self._doctor.restore(saved)

    def is_probe_due(self, step: int) -> bool:
        """Whether to run probes in a step: on schedule, or after a check newly failed."""
        has_new_failure = self._doctor is not None and self._doctor.has_new_failure
        return self.is_enabled and (is_probe_due(step) or has_new_failure)

    def submit_step(
        self,
        record: StepRecord,
        metrics: Mapping[str, Any],
        probe_results: Mapping[str, ProbeEntry],
    ) -> None:
        """Report the diagnosis of the previous step, and submit the step just finished."""
        if self._doctor is not None:
            self.report_diagnosis(record.step - 1)
            self._doctor.submit_step(record, metrics, probe_results)

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics of a step, such as those of an evaluation."""
        if self._doctor is not None:
            self._doctor.add_metrics(step, metrics)

    def report_diagnosis(self, step: int) -> None:
        """Report the diagnosis of a step if it names a new cause."""
        diagnosis = None if self._doctor is None else self._doctor.collect_diagnosis()
        if diagnosis is not None and diagnosis.cause is not None:
            self._report_cause(
                step, diagnosis.cause, diagnosis.sentence, is_certain=diagnosis.is_certain
            )

    def report_sync(self, probe_result: Mapping[str, Any], step: int, dtype: str) -> None:
        """Report the cause of a faulty weight sync before anything is sampled or trained on it."""
        finding = sampler_sync.diagnose_sync(probe_result, dtype) if self.is_enabled else None
        if finding is not None:
            fix = next(check.fix for check in CHECKS if check.name == finding.cause)
            message = f"Cause: {finding.cause} ({finding.summary}). Fix: {fix}"
            self._report_cause(step, finding.cause, message, is_certain=True)

    def _report_cause(self, step: int, cause: str, message: str, *, is_certain: bool) -> None:
        """Report a cause once; a certain one stops the run if set: no rollback fixes a cause."""
        if cause not in self._reported_causes:
            self._reported_causes.add(cause)
            self._record_event(step, DIAGNOSIS_EVENT, message, {"cause": cause})
        if self._action == "stop" and is_certain:
            raise RunStoppedError(f"{self._display_folder}: {message}")
