"""Runs the checks on a finished step in a background thread while the next one trains.

Records are immutable by then. The diagnosis of a step is collected when the next step finishes, so
the result does not depend on thread timing. A check that raises finds nothing; no failure here
reaches the training.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from klinic.checks import CHECKS
from klinic.checks.base import Answer, Check
from klinic.doctor.diagnosis import Examination
from klinic.doctor.reading import WINDOW, Cases
from klinic.errors import EvidenceError
from klinic.evidence import store
from klinic.evidence.files import json_bytes, read_json
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import DIAGNOSIS, read_run_facts
from klinic.evidence.writing import write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The conclusion of the checks after a step."""

    failed: int
    """Number of checks that have failed so far."""
    cause: str | None
    sentence: str
    diagnosis: dict[str, Any]
    """The contents of diagnosis.json; empty if the cause is not new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedDoctor:
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

    def __init__(self, folder: Path, checks: Sequence[Check] = CHECKS) -> None:
        self._folder = folder
        self._checks = checks
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klinic-doctor")
        self._pending: Future[Judgement] | None = None
        self._known = 0
        self._named: str | None = None
        self._written: dict[str, Any] | None = None
        self.curious = False
        """Whether a check failed for the first time: a reason to run the probes again."""
        self._begin()

    def _begin(self) -> None:
        self._cases = Cases(read_run_facts(self._folder))
        self._examination = Examination(self._checks)

    def begin_again(self, after: int) -> None:
        """Discard all findings: the run continues after an earlier step."""
        self.news()
        self._begin()
        self._known, self._named, self._written = 0, None, None
        self._unwrite_after(after)
        with contextlib.suppress(EvidenceError, OSError):  # the doctor works with fewer records
            steps = store.steps(self._folder)
            for step in dict.fromkeys([*steps[:1], *steps[-WINDOW:]]):
                self._cases.remember(store.read_record(self._folder, step))

    def save(self, folder: Path) -> dict[str, Any] | None:
        """Return the state for a checkpoint after pending checks; None if that fails.

        Records of the window that the run does not keep are written to the checkpoint's folder.
        """
        try:
            state = self._pool.submit(self._save, folder).result()
            json_bytes(state)
        except OSError:  # a full disk must abort the save
            raise
        except Exception:  # state that JSON cannot hold must not end a run
            return None
        return state

    def _save(self, folder: Path) -> dict[str, Any]:
        for record in self._cases.records:
            if not store.has_record(self._folder, record.step):
                store.write_record(folder, record)
        return {
            "examination": self._examination.state(),
            "cases": self._cases.state(),
            "failed": self._known,
            "cause": self._named,
            "curious": self.curious,
            "pending": None if self._pending is None else _judgement_state(self._pending),
            "diagnosis": self._written,
        }

    def restore(self, saved: SavedDoctor) -> None:
        """Restore the state of a checkpoint exactly."""
        self.news()
        self._begin()
        state = saved.state
        self._examination.restore(state["examination"])
        self._cases.restore(state["cases"], saved.read_window(self._folder))
        self._known, self._named, self.curious = state["failed"], state["cause"], state["curious"]
        self._pending = _restored_judgement(state["pending"])
        self._write(state["diagnosis"])

    def _write(self, diagnosis: dict[str, Any] | None) -> None:
        """Make diagnosis.json hold the given diagnosis, or remove it."""
        self._written = diagnosis
        path = self._folder / DIAGNOSIS
        with contextlib.suppress(OSError):  # the run itself reports a full disk
            if diagnosis is None:
                path.unlink(missing_ok=True)
            else:
                write_atomically(path, json_bytes(diagnosis) + b"\n")

    def _unwrite_after(self, step: int) -> None:
        """Delete a diagnosis of steps that were rolled back."""
        path = self._folder / DIAGNOSIS
        with contextlib.suppress(EvidenceError, OSError):
            first = read_json(path).get("first_step")
            if isinstance(first, int) and first > step:
                path.unlink()

    def see(
        self, record: StepRecord, metrics: Mapping[str, Any], answers: Mapping[str, Answer]
    ) -> None:
        """Submit a finished step to the checks."""
        self._pending = self._pool.submit(self._judge, record, dict(metrics), answers)

    def tell(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics of a step, such as those of an evaluation, after pending checks."""
        self._pool.submit(self._cases.tell, step, dict(metrics))

    def _judge(
        self, record: StepRecord, metrics: Mapping[str, Any], answers: Mapping[str, Answer]
    ) -> Judgement:
        self._examination.hear(self._cases.next(record, answers, metrics))
        found = self._examination.conclude()
        is_new = found.cause is not None and found.cause != self._named
        return Judgement(
            failed=len(self._examination.failed),
            cause=found.cause,
            sentence=found.sentence if is_new else "",
            diagnosis=found.to_json() if is_new else {},
        )

    def news(self) -> Judgement | None:
        """Return the diagnosis of the last submitted step if it names a new cause."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        try:
            found = pending.result()
        except Exception:  # a failing check must not end a run
            return None
        self.curious = found.failed > self._known
        self._known = found.failed
        if found.cause is None or found.cause == self._named:
            return None
        self._named = found.cause
        self._write(found.diagnosis)
        return found

    def close(self) -> None:
        """Wait for pending checks."""
        self._pool.shutdown(wait=True)


def _judgement_state(pending: "Future[Judgement]") -> dict[str, Any] | None:
    """Return a diagnosis that has not been collected yet; None if it failed."""
    try:
        return asdict(pending.result())
    except Exception:  # no diagnosis, as in `collect_diagnosis`
        return None


def _restored_judgement(state: Mapping[str, Any] | None) -> "Future[Judgement] | None":
    if state is None:
        return None
    pending: Future[Judgement] = Future()
    pending.set_result(Judgement(**state))
    return pending
