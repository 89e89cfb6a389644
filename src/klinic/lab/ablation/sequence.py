"""Runs trials sequentially, with progress bars."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from klinic.lab.ablation.trial import Place, run_apart

LOOK_EVERY = 0.5  # seconds


def run_in_sequence(places: Sequence[Place]) -> None:
    """Run all unfinished trials; a failure does not stop the others."""
    for place in places:
        if not place.is_finished:
            run_apart(place.folder)


@contextmanager
def bars(places: Sequence[Place], steps: int, console: Console) -> Iterator[None]:
    """Show one progress bar for all trials, and one for each running trial."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    over = threading.Event()
    with Progress(*columns, console=console, transient=True) as progress:
        watcher = threading.Thread(target=_watch, args=(places, steps, progress, over))
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


def _watch(places: Sequence[Place], steps: int, progress: Progress, over: threading.Event) -> None:
    total = progress.add_task("trials", total=len(places))
    shown = {
        place.folder: progress.add_task(_title(place), total=steps, visible=False)
        for place in places
    }
    begun = {place.folder: place.num_steps for place in places}
    while not over.wait(LOOK_EVERY):
        num_done = sum(place.is_finished or place.failure is not None for place in places)
        progress.update(total, completed=num_done)
        for place in places:
            steps_done = place.num_steps
            moving = steps_done != begun[place.folder] and not place.is_finished
            progress.update(shown[place.folder], completed=steps_done, visible=moving)


def _title(place: Place) -> str:
    return f"  {place.trial.setting.name} seed {place.trial.seed}"
