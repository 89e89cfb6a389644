"""The doctor of a run that goes on: every step is judged behind the back of the next one.

Checks run in a thread of their own, on records that nobody changes any more. What they found of a
step is heard when the next one is kept, so that it does not depend on who was faster. A check that
throws has found nothing; nothing that happens here reaches the training.
"""

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from klinic.checks import CHECKS
from klinic.checks.base import Answer, Check
from klinic.doctor.diagnosis import Diagnosis, Examination
from klinic.doctor.reading import WINDOW, Cases
from klinic.errors import EvidenceError
from klinic.evidence import store
from klinic.evidence.files import json_bytes, read_json, write_atomically
from klinic.evidence.record import StepRecord
from klinic.evidence.run_facts import DIAGNOSIS, read_run_facts


class LiveDoctor:
    """An examination that is told of every step, and says when something is new."""

    def __init__(self, folder: Path, checks: Sequence[Check] = CHECKS) -> None:
        self._folder = folder
        self._checks = checks
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="klinic-doctor")
        self._pending: Future[tuple[Diagnosis, int]] | None = None
        self._known = 0
        self._named: str | None = None
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
        self._known, self._named = 0, None
        self._unwrite_after(after)
        with contextlib.suppress(EvidenceError, OSError):  # without them it knows less
            steps = store.steps(self._folder)
            for step in dict.fromkeys([*steps[:1], *steps[-WINDOW:]]):
                self._cases.remember(store.read_record(self._folder, step))

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
    ) -> tuple[Diagnosis, int]:
        self._examination.hear(self._cases.next(record, answers, metrics))
        return self._examination.conclude(), len(self._examination.failed)

    def news(self) -> Diagnosis | None:
        """Return the diagnosis of the step that was handed over last, if it names a new cause."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        try:
            found, failed = pending.result()
        except Exception:  # a doctor that stumbles says nothing
            return None
        self.curious = failed > self._known
        self._known = failed
        if found.cause is None or found.cause == self._named:
            return None
        self._named = found.cause
        with contextlib.suppress(OSError):  # a full disk is for the run to find out
            write_atomically(self._folder / DIAGNOSIS, json_bytes(found.to_json()) + b"\n")
        return found

    def close(self) -> None:
        """Wait for what is still being judged."""
        self._pool.shutdown(wait=True)
