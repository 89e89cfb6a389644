"""Runs trials in parallel on Ray Tune, on this machine or on a Ray cluster.

Tune schedules the trials; each runs in the same subprocess as in sequential mode. Finished trials
are recognised by their folders, so a restart repeats none. Several hosts need a shared folder.
"""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from klinic.cluster.session import opened
from klinic.lab.ablation.trial import RESULT, Place, run_apart


def run_on_tune(
    places: Sequence[Place], *, address: str | None, at_once: int, num_cpus: int, storage: Path
) -> None:
    """Run all unfinished trials, at most `at_once` concurrently."""
    left = [str(place.folder.resolve()) for place in places if not place.is_finished]
    if not left:
        return
    with opened(address, num_cpus=at_once * num_cpus, num_gpus=0):
        from ray import tune

        tuner = tune.Tuner(
            tune.with_resources(_trial, {"cpu": num_cpus}),
            param_space={"folder": tune.grid_search(left)},
            tune_config=tune.TuneConfig(max_concurrent_trials=at_once, metric=None),
            run_config=tune.RunConfig(storage_path=str(storage.resolve()), name="tune", verbose=0),
        )
        with redirect_stdout(sys.stderr):  # stdout belongs to the command
            tuner.fit()


def _trial(config: dict[str, Any]) -> dict[str, float]:
    folder = Path(config["folder"])
    run_apart(folder)
    return {"finished": float((folder / RESULT).is_file())}
