"""Metrics and completions in Weights & Biases: a folder is one W&B run, however often resumed."""

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
from klinic.evidence.writing import write_atomically
from klinic.loop.folder import as_named
from klinic.loop.trackers.told import COLUMNS, rows, tag
from klinic.recipe.recipe import Recipe

KEPT = "wandb.json"
RESERVED = 10_000  # rows that one part of a run may tell before it puts more aside
START_TIMEOUT = 30.0  # seconds to reach the server in; W&B's own 90 would be spent before step 1


class WeightsAndBiases:
    """A W&B run, online where somebody is logged in and else in files that can be uploaded.

    W&B cannot forget what it was told. Steps that are void after a resume stay, and the resumed run
    tells them again: charts are over `step`, where both stand, and they are equal where the resumed
    run is bit for bit the one that was stopped.
    """

    def __init__(self, recipe: Recipe, folder: Path, tell: Callable[[str], None]) -> None:
        import wandb

        self._wandb: Any = wandb
        self._recipe = recipe
        self._folder = folder
        self._tell = tell
        self._run: Any = None
        self._row = self._reserved = 0
        self._outside: BaseException | None = None

    def begin(self, *, step: int) -> None:  # noqa: ARG002 - W&B is told, and forgets nothing
        """Start the W&B run of this folder, or go on with it; nobody is asked anything."""
        run_id, self._row = next_part(self._folder / KEPT, most_rows=RESERVED)
        self._reserved = self._row + RESERVED
        mode = self._mode()
        self._run = self._wandb.init(
            project=self._recipe.output.project,
            name=self._folder.resolve().name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=self._folder.resolve(),  # W&B's process keeps the working folder it began in
            config=self._recipe.model_dump(mode="json"),
            allow_val_change=True,  # a resumed run may have more steps
            reinit="create_new",  # a run of the user's own stays as it is
            settings=self._wandb.Settings(console="off", silent=True, init_timeout=START_TIMEOUT),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._outside = sys.exception()
        if mode == "online":
            self._tell(f"W&B: {self._run.url}")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send every number; W&B takes NaN and infinity as well."""
        self._log(step, {tag(name): value for name, value in metrics.items()})

    def completions(self, step: int, rollouts: Sequence[Rollout], record: StepRecord) -> None:
        """Send completions as a table of plain text."""
        table = self._wandb.Table(columns=list(COLUMNS), data=rows(rollouts, record))
        self._log(step, {"completions": table})

    def rewind(self, step: int) -> None:
        """W&B cannot forget: both stand over the same step."""

    def event(self, step: int, sentence: str) -> None:
        """Send it as a row of its own."""
        self._log(step, {"event": sentence})

    def close(self) -> None:
        """Finish: as failed where an error is on its way out of the run."""
        if self._run is not None:
            self._run.finish(exit_code=int(sys.exception() is not self._outside))

    def _log(self, step: int, values: dict[str, Any]) -> None:
        # committed at once: a run that is killed has told its last step
        self._run.log({"step": step, **values}, step=self._row, commit=True)
        self._row += 1
        if self._row == self._reserved:
            next_part(self._folder / KEPT, most_rows=RESERVED)
            self._reserved += RESERVED

    def _mode(self) -> str:
        """Return how to run; without a key W&B would ask for one."""
        settings = self._wandb.setup().settings
        mode: str = settings.mode
        reason = f"its mode is {mode}"
        if mode not in {"offline", "disabled"}:
            if self._logged_in(settings):
                return "online"
            mode, reason = "offline", "nobody is logged in; `wandb login` does that"
        shown = shlex.quote(str(as_named(self._folder, self._recipe)))
        upload = f"Upload with: wandb sync {shown}/wandb/offline-run-*"
        self._tell(f"W&B: {mode}, since {reason}.{f' {upload}' if mode == 'offline' else ''}")
        return mode

    def _logged_in(self, settings: Any) -> bool:
        before, settings.silent = settings.silent, True  # else it asks the server for the name
        try:
            return bool(self._wandb.login(prompt=False, verify=False))
        finally:
            settings.silent = before


def next_part(path: Path, *, most_rows: int) -> tuple[str, int]:
    """Return the id of the W&B run and the first free row, and keep both for the next part.

    W&B drops a row that counts lower than one before it, and offline it does not know what came
    before. So a part counts on from beyond all that the part before it can have told.
    """
    kept = read_json(path) if path.exists() else {"id": secrets.token_hex(4), "next_row": 0}
    run_id, row = kept.get("id"), kept.get("next_row")
    if not isinstance(run_id, str) or not isinstance(row, int):
        raise EvidenceError(
            f"{path}: must hold `id`, a text, and `next_row`, a count. Restore it from a copy, or "
            "delete it to begin another W&B run."
        )
    write_atomically(path, json_bytes({"id": run_id, "next_row": row + most_rows}) + b"\n")
    return run_id, row
