"""Runs trials sequentially, with progress bars."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from klinic.lab.ablation.trial import TrialFolder, run_in_subprocess

POLL_INTERVAL = 0.5  # seconds


def run_in_sequence(trial_folders: Sequence[TrialFolder]) -> None:
    """Run all unfinished trials; a failure does not stop the others."""
    for trial_folder in trial_folders:
        if not trial_folder.is_finished:
            run_in_subprocess(trial_folder.path)


@contextmanager
def progress_bars(
    trial_folders: Sequence[TrialFolder], steps: int, console: Console
) -> Iterator[None]:
    """Show one progress bar for all trials, and one for each running trial."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    over = threading.Event()
    with Progress(*columns, console=console, transient=True) as progress:
        watcher = threading.Thread(target=_update_bars, args=(trial_folders, steps, progress, over))
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


def _update_bars(
    trial_folders: Sequence[TrialFolder], steps: int, progress: Progress, over: threading.Event
) -> None:
    total = progress.add_task("trials", total=len(trial_folders))
    shown = {
        trial_folder.path: progress.add_task(_bar_title(trial_folder), total=steps, visible=False)
        for trial_folder in trial_folders
    }
    begun = {trial_folder.path: trial_folder.num_steps for trial_folder in trial_folders}
    while not over.wait(POLL_INTERVAL):
        num_done = sum(
            trial_folder.is_finished or trial_folder.failure is not None
            for trial_folder in trial_folders
        )
        progress.update(total, completed=num_done)
        for trial_folder in trial_folders:
            steps_done = trial_folder.num_steps
            moving = steps_done != begun[trial_folder.path] and not trial_folder.is_finished
            progress.update(shown[trial_folder.path], completed=steps_done, visible=moving)


def _bar_title(trial_folder: TrialFolder) -> str:
    return f"  {trial_folder.trial.setting.name} seed {trial_folder.trial.seed}"
