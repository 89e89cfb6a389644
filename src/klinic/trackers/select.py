"""Selects the trackers of a recipe."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from klinic.errors import MissingExtraError
from klinic.evidence.files import Journal
from klinic.evidence.run_facts import EVENTS, TENSORBOARD
from klinic.recipe.recipe import Recipe
from klinic.recipe.sections import OutputSection
from klinic.trackers.console import ConsoleTracker
from klinic.trackers.fail_safe import FailSafeTracker
from klinic.trackers.protocol import Tracker

EXTRAS = ("wandb", "trackio")


def refuse_missing_extras(output: OutputSection) -> None:
    """Refuse a tracker that is not installed, with the command to install it."""
    for name in EXTRAS:
        if name in output.trackers and not _is_installed(name):
            raise MissingExtraError(
                f"output.trackers has {name}, which needs {name}. Install it with: "
                f'pip install "klinic[{name}]"'
            )


def _is_installed(name: str) -> bool:
    spec = find_spec(name)
    # a folder named wandb, which W&B itself creates, looks like a namespace package
    return spec is not None and spec.origin is not None


def make_trackers(
    recipe: Recipe, folder: Path, console: Console, view: Tracker | None = None
) -> list[Tracker]:
    """Return the console tracker, or `view` in its place, and the recipe's other trackers."""
    print_line = partial(
        console.print, markup=False, highlight=False, soft_wrap=not console.is_terminal
    )
    events = Journal(folder / EVENTS)
    optional_trackers = _optional_trackers(recipe, folder, print_line)
    return [
        view or ConsoleTracker(console, max_steps=recipe.loop.max_steps),
        *(
            FailSafeTracker(tracker, name=name, print_line=print_line, events=events)
            for name, tracker in optional_trackers.items()
        ),
    ]


def _optional_trackers(
    recipe: Recipe, folder: Path, print_line: Callable[[str], None]
) -> dict[str, Tracker]:
    trackers: dict[str, Tracker] = {}
    if "tensorboard" in recipe.output.trackers:
        from klinic.trackers.tensorboard import TensorBoardTracker

        trackers["TensorBoard"] = TensorBoardTracker(folder / TENSORBOARD)
    if "wandb" in recipe.output.trackers:
        from klinic.trackers.wandb import WandbTracker

        trackers["W&B"] = WandbTracker(recipe, folder, print_line)
    if "trackio" in recipe.output.trackers:
        from klinic.trackers.trackio import TrackioTracker

        trackers["Trackio"] = TrackioTracker(recipe, folder, print_line)
    return trackers
