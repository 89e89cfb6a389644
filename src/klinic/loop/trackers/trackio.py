"""Metrics in trackio, in the run's folder: no server, no browser, no network."""

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
    """A trackio run of the folder's name. What is void after a resume stays and is told again."""

    def __init__(self, recipe: Recipe, folder: Path, tell: Callable[[str], None]) -> None:
        self._trackio = load(folder / FOLDER)
        self._recipe = recipe
        self._folder = folder
        self._tell = tell
        self._run: Any = None

    def begin(self, *, step: int) -> None:
        """Start the run, or go on with it."""
        # a run that goes on without a checkpoint has its metrics already, if only none
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
        self._tell(f"Trackio: look with TRACKIO_DIR={where} trackio show --project {project}")

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write every number; trackio takes NaN and infinity as well."""
        self._run.log({tag(name): value for name, value in metrics.items()}, step=step)

    def completions(self, step: int, rollouts: Sequence[Rollout], record: StepRecord) -> None:
        """Completions are in the records: trackio would show them as Markdown, which they write."""

    def rewind(self, step: int) -> None:
        """What is void stays and is told again."""

    def event(self, step: int, sentence: str) -> None:
        """Write it beside the numbers."""
        self._run.log({"event": sentence}, step=step)

    def close(self) -> None:
        """Write what is left."""
        if self._run is not None:
            with alone():
                self._trackio.finish()  # not the run's own, which would be finished again at exit


def load(folder: Path) -> Any:
    """Return trackio, made to write to the folder; it chooses one when it is imported."""
    chosen = DIR in os.environ
    with _environment({} if chosen else {DIR: str(folder.resolve())}):
        import trackio
    if not chosen and folder.resolve() != trackio.TRACKIO_DIR:
        raise ConfigError(
            f"output.trackers has trackio, but it writes to {trackio.TRACKIO_DIR} since it was "
            "first used in this process, and cannot write elsewhere. Start a process a run, or "
            f"set {DIR} before Python starts to have all runs in one folder."
        )
    return trackio


@contextmanager
def alone() -> Iterator[None]:
    """Keep trackio from printing, and from asking the hub who the user is."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        with redirect_stdout(StringIO()), _environment(dict.fromkeys(REMOTE)):
            yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables for a while; those that are None are taken away."""
    before = {name: os.environ.pop(name, None) for name in changes}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
