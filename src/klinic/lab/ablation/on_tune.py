"""Runs trials in parallel on Ray Tune, on this machine or on a Ray cluster.

Tune schedules the trials; each runs in the same subprocess as in sequential mode. Finished trials
are recognised by their folders, so a restart repeats none. Several hosts need a shared folder.
"""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from klinic.cluster.session import open_session
from klinic.lab.ablation.trial import RESULT, TrialFolder, run_in_subprocess


def run_on_tune(
    trial_folders: Sequence[TrialFolder],
    *,
    address: str | None,
    max_concurrent: int,
    num_cpus: int,
    storage: Path,
) -> None:
    """Run all unfinished trials, at most `at_once` concurrently."""
    left = [
        str(trial_folder.path.resolve())
        for trial_folder in trial_folders
        if not trial_folder.is_finished
    ]
    if not left:
        return
    with open_session(address, num_cpus=max_concurrent * num_cpus, num_gpus=0):
        from ray import tune

        tuner = tune.Tuner(
            tune.with_resources(_run_trial, {"cpu": num_cpus}),
            param_space={"folder": tune.grid_search(left)},
            tune_config=tune.TuneConfig(max_concurrent_trials=max_concurrent, metric=None),
            run_config=tune.RunConfig(storage_path=str(storage.resolve()), name="tune", verbose=0),
        )
        with redirect_stdout(sys.stderr):  # stdout belongs to the command
            tuner.fit()


def _run_trial(config: dict[str, Any]) -> dict[str, float]:
    folder = Path(config["folder"])
    run_in_subprocess(folder)
    return {"finished": float((folder / RESULT).is_file())}
