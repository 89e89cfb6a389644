"""The doctor of a run that goes on: every step is judged behind the back of the next one.

Checks run in a thread of their own, on records that nobody changes any more. What they found of a
step is heard when the next one is kept, so that it does not depend on who was faster. A check that
throws has found nothing; nothing that happens here reaches the training.
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
    """What the checks concluded after a step."""

    failed: int
    """Checks that have failed so far."""
    cause: str | None
    sentence: str
    diagnosis: dict[str, Any]
    """As diagnosis.json holds it; empty where the cause is not new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedDoctor:
    """The doctor's part of a checkpoint: its state, and the folder with records of its window."""

    state: Mapping[str, Any]
    folder: Path

    def read_window(self, run: Path) -> Iterator[StepRecord]:
        """Yield the records that the doctor looked back at; one that is damaged is left out."""
        for step in self.state["cases"]["window"]:
            with contextlib.suppress(EvidenceError, OSError):  # without it the doctor knows less
                yield store.read_record(run if store.has_record(run, step) else self.folder, step)


class LiveDoctor:
    """An examination that is told of every step, and says when something is new."""

    def __init__(self, folder: Path, checks: Sequence[Check] = CHECKS) -> None:
        self._folder = folder
        self._checks = checks
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klinic-doctor")
        self._pending: Future[Judgement] | None = None
        self._known = 0
        self._named: str | None = None
        self._written: dict[str, Any] | None = None
        self.curious = False
        """Whether a check has failed that had not: reason to ask the live parts again."""
        self._begin()

    def _begin(self) -> None:
        self._cases = Cases(read_run_facts(self._folder))
        self._examination = Examination(self._checks)

    def begin_again(self, after: int) -> None:
        """Forget what was found: the run goes on after an earlier step."""
        self.news()
        self._begin()
        self._known, self._named, self._written = 0, None, None
        self._unwrite_after(after)
        with contextlib.suppress(EvidenceError, OSError):  # without them it knows less
            steps = store.steps(self._folder)
            for step in dict.fromkeys([*steps[:1], *steps[-WINDOW:]]):
                self._cases.remember(store.read_record(self._folder, step))

    def save(self, folder: Path) -> dict[str, Any] | None:
        """Return the state for a checkpoint, behind what is being judged; None where that fails.

        Records of the window that the run does not keep go into the checkpoint's folder.
        """
        try:
            state = self._pool.submit(self._save, folder).result()
            json_bytes(state)
        except OSError:  # a full disk is the end of a save, whoever meets it
            raise
        except Exception:  # a check that measured something odd must not end a run
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
        """Continue as if the run had never gone beyond a checkpoint."""
        self.news()
        self._begin()
        state = saved.state
        self._examination.restore(state["examination"])
        self._cases.restore(state["cases"], saved.read_window(self._folder))
        self._known, self._named, self.curious = state["failed"], state["cause"], state["curious"]
        self._pending = _restored_judgement(state["pending"])
        self._write(state["diagnosis"])

    def _write(self, diagnosis: dict[str, Any] | None) -> None:
        """Bring diagnosis.json to what was found last."""
        self._written = diagnosis
        path = self._folder / DIAGNOSIS
        with contextlib.suppress(OSError):  # a full disk is for the run to find out
            if diagnosis is None:
                path.unlink(missing_ok=True)
            else:
                write_atomically(path, json_bytes(diagnosis) + b"\n")

    def _unwrite_after(self, step: int) -> None:
        """Delete a diagnosis that is about steps which are forgotten."""
        path = self._folder / DIAGNOSIS
        with contextlib.suppress(EvidenceError, OSError):
            first = read_json(path).get("first_step")
            if isinstance(first, int) and first > step:
                path.unlink()

    def see(
        self, record: StepRecord, metrics: Mapping[str, Any], answers: Mapping[str, Answer]
    ) -> None:
        """Hand over a step that is done."""
        self._pending = self._pool.submit(self._judge, record, dict(metrics), answers)

    def tell(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics of a step, such as those of an evaluation: behind what is judged now."""
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
        """Return the diagnosis of the step that was handed over last, if it names a new cause."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        try:
            found = pending.result()
        except Exception:  # a doctor that stumbles says nothing
            return None
        self.curious = found.failed > self._known
        self._known = found.failed
        if found.cause is None or found.cause == self._named:
            return None
        self._named = found.cause
        self._write(found.diagnosis)
        return found

    def close(self) -> None:
        """Wait for what is still being judged."""
        self._pool.shutdown(wait=True)


def _judgement_state(pending: "Future[Judgement]") -> dict[str, Any] | None:
    """Return a judgement that nobody has read yet; None where it failed."""
    try:
        return asdict(pending.result())
    except Exception:  # nothing was found, as in `news`
        return None


def _restored_judgement(state: Mapping[str, Any] | None) -> "Future[Judgement] | None":
    if state is None:
        return None
    pending: Future[Judgement] = Future()
    pending.set_result(Judgement(**state))
    return pending
