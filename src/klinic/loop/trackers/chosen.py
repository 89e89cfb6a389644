"""Selects the trackers of a recipe."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from klinic.errors import MissingExtraError
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import EVENTS
from klinic.loop.folder import TENSORBOARD
from klinic.loop.trackers.console import ConsoleTracker
from klinic.loop.trackers.guarded import Guarded
from klinic.loop.trackers.protocol import Tracker
from klinic.recipe.output import OutputSection
from klinic.recipe.recipe import Recipe

EXTRAS = ("wandb", "trackio")


def refuse_missing(output: OutputSection) -> None:
    """Refuse a tracker that is not installed, with the command to install it."""
    for name in EXTRAS:
        if name in output.trackers and not _installed(name):
            raise MissingExtraError(
                f"output.trackers has {name}, which needs {name}. Install it with: "
                f'pip install "klinic[{name}]"'
            )


def _installed(name: str) -> bool:
    spec = find_spec(name)
    # a folder named wandb, which W&B itself creates, looks like a namespace package
    return spec is not None and spec.origin is not None


def chosen(
    recipe: Recipe, folder: Path, console: Console, view: Tracker | None = None
) -> list[Tracker]:
    """Return the console tracker, or `view` in its place, and the recipe's other trackers."""
    tell = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    events = Journal(folder / EVENTS)
    others = _others(recipe, folder, tell)
    return [
        view or ConsoleTracker(console, max_steps=recipe.loop.max_steps),
        *(Guarded(other, name=name, tell=tell, events=events) for name, other in others.items()),
    ]


def _others(recipe: Recipe, folder: Path, tell: Callable[[str], None]) -> dict[str, Tracker]:
    found: dict[str, Tracker] = {}
    if "tensorboard" in recipe.output.trackers:
        from klinic.loop.trackers.tensorboard import TensorBoard

        found["TensorBoard"] = TensorBoard(folder / TENSORBOARD)
    if "wandb" in recipe.output.trackers:
        from klinic.loop.trackers.wandb import WeightsAndBiases

        found["W&B"] = WeightsAndBiases(recipe, folder, tell)
    if "trackio" in recipe.output.trackers:
        from klinic.loop.trackers.trackio import Trackio

        found["Trackio"] = Trackio(recipe, folder, tell)
    return found
