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
from klinic.loop.trackers.told import tag
from klinic.recipe.recipe import Recipe

FOLDER = "trackio"
DIR = "TRACKIO_DIR"
REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID", "TRACKIO_DATASET_ID")


class Trackio:
    """A trackio run named after the folder. Steps voided by a resume stay and are logged again."""

    def __init__(self, recipe: Recipe, folder: Path, tell: Callable[[str], None]) -> None:
        self._trackio = load(folder / FOLDER)
        self._recipe = recipe
        self._folder = folder
        self._tell = tell
        self._run: Any = None

    def begin(self, *, step: int) -> None:
        """Start or resume the trackio run."""
        # a run resumed without a checkpoint has a metrics file, possibly empty
        resumed = step > 0 or (self._folder / METRICS).exists()
        with alone():
            self._run = self._trackio.init(
                project=self._recipe.output.project,
                name=self._folder.resolve().name,
                config=self._recipe.model_dump(mode="json"),
                resume="allow" if resumed else "never",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        where, project = map(
            shlex.quote, (str(self._trackio.TRACKIO_DIR), self._recipe.output.project)
        )
        self._tell(f"Trackio: show with TRACKIO_DIR={where} trackio show --project {project}")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log every metric; trackio accepts NaN and infinity."""
        self._run.log({tag(name): value for name, value in metrics.items()}, step=step)

    def completions(self, step: int, rollouts: Sequence[Rollout], record: StepRecord) -> None:
        """Completions are in the records: trackio would render their text as Markdown."""

    def rewind(self, step: int) -> None:
        """Void steps stay and are logged again."""

    def event(self, step: int, sentence: str) -> None:
        """Log the message with the metrics."""
        self._run.log({"event": sentence}, step=step)

    def close(self) -> None:
        """Finish the trackio run."""
        if self._run is not None:
            with alone():
                self._trackio.finish()  # not `run.finish`, which trackio would call again at exit


def load(folder: Path) -> Any:
    """Import trackio with its data folder set, which it reads at import."""
    chosen = DIR in os.environ
    with _environment({} if chosen else {DIR: str(folder.resolve())}):
        import trackio
    if not chosen and folder.resolve() != trackio.TRACKIO_DIR:
        raise ConfigError(
            f"output.trackers has trackio, but it writes to {trackio.TRACKIO_DIR} since it was "
            "first used in this process, and cannot write elsewhere. Start one process per run, "
            f"or set {DIR} before Python starts to have all runs in one folder."
        )
    return trackio


@contextmanager
def alone() -> Iterator[None]:
    """Suppress trackio's output and its requests to the hub."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        with redirect_stdout(StringIO()), _environment(dict.fromkeys(REMOTE)):
            yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
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
