"""Metrics and completions in Weights & Biases: one W&B run per folder, across resumes."""

import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from klinic.errors import EvidenceError
from klinic.evidence.files import json_bytes, read_json
from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Rollout
from klinic.evidence.run_facts import display_path
from klinic.evidence.writing import write_atomically
from klinic.recipe.recipe import Recipe
from klinic.trackers.format import COMPLETION_COLUMNS, completion_rows, metric_tag

STATE_FILE = "wandb.json"
RESERVED_ROWS = 10_000  # rows that a process reserves at a time
START_TIMEOUT = 30.0  # seconds to reach the server; W&B's default of 90 would delay step 1


class WandbTracker:
    """A W&B run: online if logged in, else in files that can be uploaded.

    W&B cannot delete rows. Steps voided by a resume stay, and the resumed run logs them again:
    charts use `step` as their axis, and both rows are equal where the resumed run is bit for bit
    the stopped one.
    """

    def __init__(self, recipe: Recipe, folder: Path, print_line: Callable[[str], None]) -> None:
        import wandb

        self._wandb: Any = wandb
        self._recipe = recipe
        self._folder = folder
        self._print_line = print_line
        self._run: Any = None
        self._row = self._reserved = 0
        self._outer_exception: BaseException | None = None

    def begin(self, *, step: int) -> None:  # noqa: ARG002 - W&B cannot delete rows
        """Start or resume the W&B run of this folder, without prompting."""
        run_id, self._row = reserve_rows(self._folder / STATE_FILE, num_rows=RESERVED_ROWS)
        self._reserved = self._row + RESERVED_ROWS
        mode = self._choose_mode()
        self._run = self._wandb.init(
            project=self._recipe.output.project,
            name=self._folder.resolve().name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=self._folder.resolve(),  # W&B's process keeps its initial working folder
            config=self._recipe.model_dump(mode="json"),
            allow_val_change=True,  # a resumed run may have more steps
            reinit="create_new",  # leaves a W&B run of the user open
            settings=self._wandb.Settings(console="off", silent=True, init_timeout=START_TIMEOUT),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._outer_exception = sys.exception()
        if mode == "online":
            self._print_line(f"W&B: {self._run.url}")

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send every metric; W&B accepts NaN and infinity."""
        self._log_row(step, {metric_tag(name): value for name, value in metrics.items()})

    def log_completions(self, step: int, rollouts: Sequence[Rollout], record: StepRecord) -> None:
        """Send completions as a table of plain text."""
        table = self._wandb.Table(
            columns=list(COMPLETION_COLUMNS), data=completion_rows(rollouts, record)
        )
        self._log_row(step, {"completions": table})

    def rewind(self, step: int) -> None:
        """W&B cannot delete rows: both versions of a step stay."""

    def log_message(self, step: int, message: str) -> None:
        """Send the message as a separate row."""
        self._log_row(step, {"event": message})

    def close(self) -> None:
        """Finish the W&B run, as failed if an exception is ending the run."""
        if self._run is not None:
            self._run.finish(exit_code=int(sys.exception() is not self._outer_exception))

    def _log_row(self, step: int, values: dict[str, Any]) -> None:
        # committed at once: a kill loses no step
        self._run.log({"step": step, **values}, step=self._row, commit=True)
        self._row += 1
        if self._row == self._reserved:
            reserve_rows(self._folder / STATE_FILE, num_rows=RESERVED_ROWS)
            self._reserved += RESERVED_ROWS

    def _choose_mode(self) -> str:
        """Return the mode; without a key W&B would prompt for one."""
        settings = self._wandb.setup().settings
        mode: str = settings.mode
        reason = f"its mode is {mode}"
        if mode not in {"offline", "disabled"}:
            if self._is_logged_in(settings):
                return "online"
            mode, reason = "offline", "you are not logged in; run `wandb login`"
        display_folder = shlex.quote(str(display_path(self._folder, self._recipe)))
        upload = f"Upload with: wandb sync {display_folder}/wandb/offline-run-*"
        self._print_line(f"W&B: {mode}, since {reason}.{f' {upload}' if mode == 'offline' else ''}")
        return mode

    def _is_logged_in(self, settings: Any) -> bool:
        before, settings.silent = settings.silent, True  # else it fetches the user name
        try:
            return bool(self._wandb.login(prompt=False, verify=False))
        finally:
            settings.silent = before


def reserve_rows(path: Path, *, num_rows: int) -> tuple[str, int]:
    """Return the id of the W&B run and the first free row, and reserve `num_rows` rows.

    W&B drops a row whose number is below an earlier one, and offline it does not know earlier rows.
    A resumed process therefore starts after all rows that the process before it may have used.
    """
    state = read_json(path) if path.exists() else {"id": secrets.token_hex(4), "next_row": 0}
    run_id, row = state.get("id"), state.get("next_row")
    if not isinstance(run_id, str) or not isinstance(row, int):
        raise EvidenceError(
            f"{path}: must hold `id`, a text, and `next_row`, a count. Restore it from a copy, or "
            "delete it to begin another W&B run."
        )
    write_atomically(path, json_bytes({"id": run_id, "next_row": row + num_rows}) + b"\n")
    return run_id, row
