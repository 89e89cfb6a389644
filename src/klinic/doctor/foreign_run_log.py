"""The log of a run of another trainer: run folder, live doctor and console lines.

In a run of several processes rank 0 writes and diagnoses, and broadcasts once a step what all
processes must decide alike: whether to stop, and whether probes are due.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from klinic.doctor.live import LiveDoctor
from klinic.errors import RunStoppedError
from klinic.evidence.files import Journal
from klinic.evidence.processes import SINGLE_PROCESS, Processes, broadcast_json
from klinic.evidence.record import Fact, StepRecord
from klinic.evidence.run_facts import (
    ENDED,
    EVENTS,
    METRICS,
    PROBES,
    RECIPE,
    end_like_facts,
    write_run_facts,
    write_tokens,
)
from klinic.evidence.store import RecordWriter
from klinic.evidence.writing import refuse_links_out, write_atomically

DOCTOR_MODES = ("tell", "stop", "none")
"""Doctor modes: report causes, report and stop, or no doctor."""
NOTHING_RECORDED = "No step was recorded, so nothing was examined: this says nothing about the run."


class ForeignRunLog:
    """Writes the run folder step by step and feeds the live doctor; only rank 0 writes."""

    def __init__(
        self,
        folder: Path,
        *,
        doctor: str,
        console: Console,
        processes: Processes = SINGLE_PROCESS,
    ) -> None:
        self.folder = folder
        self.processes = processes
        self._doctor_mode = doctor
        self._console = console
        self._metrics = Journal(folder / METRICS)
        self._events = Journal(folder / EVENTS)
        self._probes = Journal(folder / PROBES)
        self._open_files: ExitStack | None = None
        self._doctor: LiveDoctor | None = None
        self._named_causes: set[str] = set()
        self.num_steps = 0
        self.is_probe_due = False
        """Whether a check failed for the first time, so that the probes should run again."""

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the run folder and diagnoses: rank 0."""
        return self.processes.rank == 0

    @property
    def has_doctor(self) -> bool:
        """Whether a doctor examines the steps."""
        return self._doctor_mode != "none"

    def begin_run(
        self, facts: Mapping[str, Any], texts: Mapping[int, str], recipe: str | None = None
    ) -> None:
        """Write the files of the whole run, open the record writer and start the doctor."""
        self.close()
        if not self.is_writer:
            return
        refuse_links_out(self.folder)
        write_run_facts(self.folder, {**facts, **end_like_facts(texts)})
        if texts:
            write_tokens(self.folder, texts)
        if recipe is not None:
            write_atomically(self.folder / RECIPE, recipe.encode())
        self._open_files = ExitStack()
        self._writer = self._open_files.enter_context(RecordWriter(self.folder))
        self._doctor = LiveDoctor(self.folder) if self.has_doctor else None
        if self._doctor is not None:
            self._open_files.callback(self._doctor.close)

    def record_step(
        self,
        record: StepRecord | None,
        metrics: Mapping[str, float],
        probe_results: Mapping[str, Any],
        decisions: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Any]:
        """Write a step, and report the diagnosis of the previous one.

        `record` holds the rows of all processes; ranks other than 0 pass None. Return the
        `decisions` of rank 0, which are JSON values, on every process.
        """
        self.num_steps += 1
        if self.processes.size == 1:
            assert record is not None  # noqa: S101 - a single process has the rows
            self._write_step(record, metrics, probe_results)
            return decisions or {}
        reason = None
        if record is not None:
            try:
                self._write_step(record, metrics, probe_results)
            except RunStoppedError as error:  # raised on every process
                reason = str(error)
        shared = {"stop": reason, "probes": self.is_probe_due, "decisions": decisions or {}}
        shared = broadcast_json(self.processes, shared)
        self.is_probe_due = shared["probes"]
        if shared["stop"] is not None:
            raise RunStoppedError(shared["stop"])
        decided: Mapping[str, Any] = shared["decisions"]
        return decided

    def _write_step(
        self, record: StepRecord, metrics: Mapping[str, float], probe_results: Mapping[str, Any]
    ) -> None:
        self._metrics.append({"step": record.step, **metrics})
        for name, result in probe_results.items():
            self._probes.append({"step": record.step, "probe": name, **result})
        if self._open_files is None:
            return
        self._writer.put(record)
        if self._doctor is not None:
            self.report_diagnosis(record.step - 1)
            self._doctor.submit_step(record, metrics, probe_results)

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics that belong to no update, such as those of an evaluation."""
        if not self.is_writer:
            return
        self._metrics.append({"step": step, **metrics})
        if self._open_files is not None and self._doctor is not None:
            self._doctor.add_metrics(step, metrics)

    def report_diagnosis(self, step: int) -> None:
        """Report a new cause; in the mode `stop`, raise RunStoppedError if it is certain."""
        diagnosis = (
            None
            if self._open_files is None or self._doctor is None
            else self._doctor.collect_diagnosis()
        )
        if self._doctor is not None:
            self.is_probe_due = self._doctor.has_new_failure
        if diagnosis is None or diagnosis.cause is None:
            return
        if diagnosis.cause not in self._named_causes:
            self._named_causes.add(diagnosis.cause)
            self.record_event(step, "diagnosis", diagnosis.sentence, {"cause": diagnosis.cause})
        if self._doctor_mode == "stop" and diagnosis.is_certain:
            raise RunStoppedError(f"{self.folder}: {diagnosis.sentence}")

    def record_event(
        self, step: int, name: str, sentence: str, facts: Mapping[str, Fact] | None = None
    ) -> None:
        """Write an event and print it."""
        if not self.is_writer:
            return
        self._events.append({"step": step, "event": name, "says": sentence, **(facts or {})})
        self.print_line(f"Step {step} | {sentence}", style="yellow")

    def print_line(self, sentence: str, style: str = "") -> None:
        """Print one console line."""
        if not self.is_writer:
            return
        line = Text(f"klinic | {sentence}", style=style)
        self._console.print(line, highlight=False, soft_wrap=not self._console.is_terminal)

    def end_run(self, step: int, error: BaseException | None = None) -> None:
        """Report the diagnosis of the last step, close the log and print a summary.

        `error` is the exception that ended the training, which no later one may hide.
        """
        if self._open_files is None:
            return
        try:
            self.report_diagnosis(step)
        except RunStoppedError:
            if error is None:
                raise
        finally:
            self.close()
            # watchers need this event: only klinic's own training holds a lock that shows the end
            self._events.append({"step": step, "event": ENDED, "says": self._end_sentence(error)})
        self._print_summary()

    def _end_sentence(self, error: BaseException | None) -> str:
        sentence = f"Training ended after {self.num_steps} steps."
        return sentence if error is None else f"{sentence} It raised {type(error).__name__}."

    def _print_summary(self) -> None:
        if self.num_steps == 0:
            self.print_line(f"{NOTHING_RECORDED} Run: {self.folder}", style="yellow")
        elif self.has_doctor:
            causes = ", ".join(sorted(self._named_causes)) or "no cause was found"
            self.print_line(f"{self.num_steps} steps examined: {causes}. Run: {self.folder}")

    def close(self) -> None:
        """Wait for pending writes and diagnoses, then close."""
        open_files, self._open_files = self._open_files, None
        if open_files is not None:
            open_files.close()
