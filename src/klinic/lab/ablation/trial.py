"""One trial, trained and measured in a process of its own: what breaks there breaks nothing else.

`python -m klinic.lab.ablation.trial FOLDER` does what FOLDER/trial.json says. A trial that was
killed goes on from its newest checkpoint, and one that is finished has a result.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klinic.errors import KlinicError
from klinic.evidence.files import json_bytes, read_json
from klinic.evidence.run_facts import METRICS, RECIPE
from klinic.evidence.writing import open_log, remove_tree, write_atomically
from klinic.lab.ablation.plan import WATCH_KL_EVERY, Plan, Trial, overrides_of
from klinic.orphans import PARENT, die_with

SPEC, RESULT, FAILED = "trial.json", "result.json", "failed.json"
RUN, LOG = "run", "log.txt"
SPEAKS_LAST = 400  # characters of what a trial said before it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A trial and where it lives."""

    trial: Trial
    folder: Path

    @property
    def is_finished(self) -> bool:
        """Whether it was trained and measured."""
        return (self.folder / RESULT).is_file()

    @property
    def failure(self) -> str | None:
        """Why it failed, if it did."""
        path = self.folder / FAILED
        return str(read_json(path)["why"]) if path.is_file() else None

    @property
    def num_steps(self) -> int:
        """How many steps it has made so far."""
        path = self.folder / RUN / METRICS
        # evaluations have lines of their own, without a loss
        return path.read_bytes().count(b'"loss": ') if path.is_file() else 0


def places(folder: Path, plan: Plan, num_prompts: int | None) -> list[Place]:
    """Return all trials of a plan, each with a folder that says what is to be done there."""
    found = []
    for trial in plan.trials():
        place = Place(trial=trial, folder=folder / trial.folder)
        place.folder.mkdir(parents=True, exist_ok=True)
        spec = {
            "recipe": str((folder / RECIPE).resolve()),
            "overrides": [*overrides_of(plan, trial.setting), f"seed={trial.seed}"],
            "setting": trial.setting.name,
            "seed": trial.seed,
            "num_prompts": num_prompts,
        }
        write_atomically(place.folder / SPEC, json_bytes(spec))
        found.append(place)
    return found


def run_apart(folder: Path) -> None:
    """Run the trial of a folder in another process; write down why if it fails."""
    (folder / FAILED).unlink(missing_ok=True)
    command = [sys.executable, "-m", "klinic.lab.ablation.trial", str(folder)]
    with open_log(folder / LOG) as log:
        process = subprocess.Popen(  # noqa: S603 - this very Python
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, PARENT: str(os.getpid())},
        )
        try:
            code = process.wait()
        except BaseException:
            process.wait()  # it was interrupted with us, saves, and ends
            raise
    if not (folder / RESULT).is_file():
        said = (folder / LOG).read_text(errors="replace").strip()[-SPEAKS_LAST:]
        why = said.splitlines()[-1] if said else "it said nothing"
        if code < 0:
            why = f"it was killed by signal {-code}; the last it said was: {why}"
        write_atomically(folder / FAILED, json_bytes({"why": why, "exit_code": code}))


def work(folder: Path) -> None:
    """Train and measure the trial of a folder."""
    from rich.console import Console

    from klinic.lab.ablation.measures import measure
    from klinic.loop.compare import evaluate_subject, find_subject
    from klinic.loop.source import Given
    from klinic.loop.train import train
    from klinic.recipe.loading import load

    spec, run = read_json(folder / SPEC), folder / RUN
    recipe = load(spec["recipe"], [*spec["overrides"], *_own(spec, run)]).recipe
    begun = (run / RECIPE).is_file()
    if not begun:
        remove_tree(run)  # killed before there was a run to go on with
    console = Console(file=sys.stdout, highlight=False)
    done = train(
        recipe, name=folder.name, given=Given(), start="resume" if begun else "new", console=console
    )
    if done.signal is not None:
        raise SystemExit(128 + done.signal)
    num = spec["num_prompts"] or recipe.loop.eval_prompts
    # the recipe is the one that the user passed, and its code has just run
    found = evaluate_subject(
        find_subject(str(run), run_code=True), reference=None, prompts=None, task=None, num=num
    )
    result = {
        "setting": spec["setting"],
        "seed": spec["seed"],
        "steps": done.step,
        **measure(run, found),
    }
    write_atomically(folder / RESULT, json_bytes(result))


def _own(spec: dict[str, Any], run: Path) -> list[str]:
    """Return what every trial has on top of its recipe."""
    from klinic.recipe.loading import load

    own = [f"output.dir={run}", "output.trackers=[]"]
    kl = load(spec["recipe"], spec["overrides"]).recipe.kl
    if kl is not None and not kl.needs_reference:
        own.append(f"kl.monitor_every={WATCH_KL_EVERY}")  # looks, and changes no weight
    return own


def main() -> int:
    """Run the trial that is named on the command line."""
    if PARENT in os.environ:
        die_with(int(os.environ.pop(PARENT)))
    try:
        work(Path(sys.argv[1]))
    except KlinicError as error:
        sys.stdout.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
