"""The run log of a TRL run: run folder, live doctor and console lines."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from klinic.errors import RunStoppedError
from klinic.evidence.files import Journal
from klinic.evidence.record import StepRecord
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
from klinic.loop.live_doctor import LiveDoctor
from klinic.recipe import yaml_text

HOW = ("tell", "stop", "none")
"""Doctor modes: report causes, report and stop, or no doctor."""
HEAD = "# TRL's config, as far as recipe keys exist for it.\n"


class Keeper:
    """Writes the run folder step by step and feeds the live doctor."""

    def __init__(self, folder: Path, *, doctor: str, console: Console) -> None:
        self.folder = folder
        self._how = doctor
        self._console = console
        self._metrics = Journal(folder / METRICS)
        self._events = Journal(folder / EVENTS)
        self._answers = Journal(folder / PROBES)
        self._open: ExitStack | None = None
        self._named: set[str] = set()
        self.num_steps = 0

    @property
    def curious(self) -> bool:
        """Whether a check failed for the first time, so that the probes should run again."""
        return self._open is not None and self._doctor is not None and self._doctor.curious

    @property
    def examined(self) -> bool:
        """Whether a doctor examines the steps."""
        return self._how != "none"

    def begin(
        self, facts: Mapping[str, Any], recipe: Mapping[str, Any], texts: Mapping[int, str]
    ) -> None:
        """Write the files of the whole run, open the record writer and start the doctor."""
        self.close()
        refuse_links_out(self.folder)
        write_run_facts(self.folder, facts)
        write_tokens(self.folder, texts)
        write_atomically(self.folder / RECIPE, (HEAD + yaml_text.write(dict(recipe))).encode())
        self._open = ExitStack()
        self._writer = self._open.enter_context(RecordWriter(self.folder))
        self._doctor = LiveDoctor(self.folder) if self.examined else None
        if self._doctor is not None:
            self._open.callback(self._doctor.close)

    def keep(
        self, record: StepRecord, metrics: Mapping[str, float], answers: Mapping[str, Any]
    ) -> None:
        """Write a step, and report the diagnosis of the previous one."""
        self.num_steps += 1
        self._metrics.append({"step": record.step, **metrics})
        for name, answer in answers.items():
            self._answers.append({"step": record.step, "probe": name, **answer})
        if self._open is None:
            return
        self._writer.put(record)
        if self._doctor is not None:
            self.hear(record.step - 1)
            self._doctor.see(record, metrics, answers)

    def tell(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics that belong to no update, such as those of an evaluation."""
        self._metrics.append({"step": step, **metrics})
        if self._open is not None and self._doctor is not None:
            self._doctor.tell(step, metrics)

    def hear(self, step: int) -> None:
        """Report a newly named cause; raise RunStoppedError in the mode `stop`."""
        found = None if self._open is None or self._doctor is None else self._doctor.news()
        if found is None or found.cause is None or found.cause in self._named:
            return
        self._named.add(found.cause)
        self.event(step, "diagnosis", found.sentence, cause=found.cause)
        if self._how == "stop":
            raise RunStoppedError(f"{self.folder}: {found.sentence}")

    def event(self, step: int, name: str, sentence: str, **facts: Any) -> None:
        """Write an event and print it."""
        self._events.append({"step": step, "event": name, "says": sentence, **facts})
        self.say(f"Step {step} | {sentence}", style="yellow")

    def say(self, sentence: str, style: str = "") -> None:
        """Print one console line."""
        told = Text(f"klinic | {sentence}", style=style)
        self._console.print(told, highlight=False, soft_wrap=True)

    def end(self, step: int) -> None:
        """Report the diagnosis of the last step, close the log and print a summary."""
        if self._open is None:
            return
        self.hear(step)
        self.close()
        # watchers need this event: only klinic's own training holds a lock that shows the end
        says = f"Training ended after {self.num_steps} steps."
        self._events.append({"step": step, "event": ENDED, "says": says})
        if self.examined:
            named = ", ".join(sorted(self._named)) or "no cause was found"
            self.say(f"{self.num_steps} steps examined: {named}. Run: {self.folder}")

    def close(self) -> None:
        """Wait for pending writes and diagnoses, then close."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()
