"""Metrics in trackio, in the run folder: no server, no browser, no network."""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from klinic.errors import ConfigError
from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Rollout
from klinic.evidence.run_facts import METRICS
from klinic.recipe.recipe import Recipe
from klinic.trackers.format import metric_tag

TRACKIO_FOLDER = "trackio"
DIR_VARIABLE = "TRACKIO_DIR"
REMOTE_VARIABLES = (
    "TRACKIO_SPACE_ID",
    "TRACKIO_SERVER_URL",
    "TRACKIO_BUCKET_ID",
    "TRACKIO_DATASET_ID",
)


class TrackioTracker:
    """A trackio run named after the folder. Steps voided by a resume stay and are logged again."""

    def __init__(self, recipe: Recipe, folder: Path, print_line: Callable[[str], None]) -> None:
        self._trackio = import_trackio(folder / TRACKIO_FOLDER)
        self._recipe = recipe
        self._folder = folder
        self._print_line = print_line
        self._run: Any = None

    def begin(self, *, step: int) -> None:
        """Start or resume the trackio run."""
        # a run resumed without a checkpoint has a metrics file, possibly empty
        resumed = step > 0 or (self._folder / METRICS).exists()
        with quiet_and_offline():
            self._run = self._trackio.init(
                project=self._recipe.output.project,
                name=self._folder.resolve().name,
                config=self._recipe.model_dump(mode="json"),
                resume="allow" if resumed else "never",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        data_folder, project = map(
            shlex.quote, (str(self._trackio.TRACKIO_DIR), self._recipe.output.project)
        )
        self._print_line(
            f"Trackio: show with TRACKIO_DIR={data_folder} trackio show --project {project}"
        )

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log every metric; trackio accepts NaN and infinity."""
        self._run.log({metric_tag(name): value for name, value in metrics.items()}, step=step)

    def log_completions(self, step: int, rollouts: Sequence[Rollout], record: StepRecord) -> None:
        """Completions are in the records: trackio would render their text as Markdown."""

    def rewind(self, step: int) -> None:
        """Void steps stay and are logged again."""

    def log_message(self, step: int, message: str) -> None:
        """Log the message with the metrics."""
        self._run.log({"event": message}, step=step)

    def close(self) -> None:
        """Finish the trackio run."""
        if self._run is not None:
            with quiet_and_offline():
                self._trackio.finish()  # not `run.finish`, which trackio would call again at exit


def import_trackio(folder: Path) -> Any:
    """Import trackio with its data folder set, which it reads at import."""
    is_chosen = DIR_VARIABLE in os.environ
    with _set_environment({} if is_chosen else {DIR_VARIABLE: str(folder.resolve())}):
        import trackio
    if not is_chosen and folder.resolve() != trackio.TRACKIO_DIR:
        raise ConfigError(
            f"output.trackers has trackio, but it writes to {trackio.TRACKIO_DIR} since it was "
            "first used in this process, and cannot write elsewhere. Start one process per run, "
            f"or set {DIR_VARIABLE} before Python starts to have all runs in one folder."
        )
    return trackio


@contextmanager
def quiet_and_offline() -> Iterator[None]:
    """Suppress trackio's output and its requests to the hub."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        with redirect_stdout(StringIO()), _set_environment(dict.fromkeys(REMOTE_VARIABLES)):
            yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _set_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables temporarily; None removes one."""
    before = {name: os.environ.pop(name, None) for name in changes}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
