"""The run log of a TRL run: run folder, live doctor and console lines."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from klinic.doctor.live import LiveDoctor
from klinic.errors import RunStoppedError
from klinic.evidence.files import Journal
from klinic.evidence.record import Fact, StepRecord
from klinic.evidence.run_facts import (
    ENDED,
    EVENTS,
    METRICS,
    PROBES,
    RECIPE,
    write_run_facts,
    write_tokens,
)
from klinic.evidence.store import RecordWriter
from klinic.evidence.writing import refuse_links_out, write_atomically
from klinic.recipe import yaml_text

DOCTOR_MODES = ("tell", "stop", "none")
"""Doctor modes: report causes, report and stop, or no doctor."""
RECIPE_HEADER = "# TRL's config, as far as recipe keys exist for it.\n"


class TRLRunLog:
    """Writes the run folder step by step and feeds the live doctor."""

    def __init__(self, folder: Path, *, doctor: str, console: Console) -> None:
        self.folder = folder
        self._doctor_mode = doctor
        self._console = console
        self._metrics = Journal(folder / METRICS)
        self._events = Journal(folder / EVENTS)
        self._probes = Journal(folder / PROBES)
        self._open_files: ExitStack | None = None
        self._named_causes: set[str] = set()
        self.num_steps = 0

    @property
    def is_probe_due(self) -> bool:
        """Whether a check failed for the first time, so that the probes should run again."""
        return (
            self._open_files is not None
            and self._doctor is not None
            and self._doctor.has_new_failure
        )

    @property
    def has_doctor(self) -> bool:
        """Whether a doctor examines the steps."""
        return self._doctor_mode != "none"

    def begin_run(
        self, facts: Mapping[str, Any], recipe: Mapping[str, Any], texts: Mapping[int, str]
    ) -> None:
        """Write the files of the whole run, open the record writer and start the doctor."""
        self.close()
        refuse_links_out(self.folder)
        write_run_facts(self.folder, facts)
        write_tokens(self.folder, texts)
        write_atomically(
            self.folder / RECIPE, (RECIPE_HEADER + yaml_text.dump_yaml(dict(recipe))).encode()
        )
        self._open_files = ExitStack()
        self._writer = self._open_files.enter_context(RecordWriter(self.folder))
        self._doctor = LiveDoctor(self.folder) if self.has_doctor else None
        if self._doctor is not None:
            self._open_files.callback(self._doctor.close)

    def record_step(
        self, record: StepRecord, metrics: Mapping[str, float], probe_results: Mapping[str, Any]
    ) -> None:
        """Write a step, and report the diagnosis of the previous one."""
        self.num_steps += 1
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
        self._metrics.append({"step": step, **metrics})
        if self._open_files is not None and self._doctor is not None:
            self._doctor.add_metrics(step, metrics)

    def report_diagnosis(self, step: int) -> None:
        """Report a newly named cause; raise RunStoppedError in the mode `stop`."""
        diagnosis = (
            None
            if self._open_files is None or self._doctor is None
            else self._doctor.collect_diagnosis()
        )
        if diagnosis is None or diagnosis.cause is None or diagnosis.cause in self._named_causes:
            return
        self._named_causes.add(diagnosis.cause)
        self.record_event(step, "diagnosis", diagnosis.sentence, {"cause": diagnosis.cause})
        if self._doctor_mode == "stop":
            raise RunStoppedError(f"{self.folder}: {diagnosis.sentence}")

    def record_event(
        self, step: int, name: str, sentence: str, facts: Mapping[str, Fact] | None = None
    ) -> None:
        """Write an event and print it."""
        self._events.append({"step": step, "event": name, "says": sentence, **(facts or {})})
        self.print_line(f"Step {step} | {sentence}", style="yellow")

    def print_line(self, sentence: str, style: str = "") -> None:
        """Print one console line."""
        line = Text(f"klinic | {sentence}", style=style)
        self._console.print(line, highlight=False, soft_wrap=True)

    def end_run(self, step: int) -> None:
        """Report the diagnosis of the last step, close the log and print a summary."""
        if self._open_files is None:
            return
        self.report_diagnosis(step)
        self.close()
        # watchers need this event: only klinic's own training holds a lock that shows the end
        sentence = f"Training ended after {self.num_steps} steps."
        self._events.append({"step": step, "event": ENDED, "says": sentence})
        if self.has_doctor:
            causes = ", ".join(sorted(self._named_causes)) or "no cause was found"
            self.print_line(f"{self.num_steps} steps examined: {causes}. Run: {self.folder}")

    def close(self) -> None:
        """Wait for pending writes and diagnoses, then close."""
        open_files, self._open_files = self._open_files, None
        if open_files is not None:
            open_files.close()
