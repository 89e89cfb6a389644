"""Trains and evaluates one trial in a subprocess, so that a crash does not affect the others.

`python -m klinic.lab.ablation.trial FOLDER` runs the trial in FOLDER/trial.json. A killed trial
resumes from its newest checkpoint; a finished one has FOLDER/result.json.
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
SPEAKS_LAST = 400  # characters of a failed trial's log that are searched for its last line


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A trial and its folder."""

    trial: Trial
    folder: Path

    @property
    def is_finished(self) -> bool:
        """Whether it has been trained and evaluated."""
        return (self.folder / RESULT).is_file()

    @property
    def failure(self) -> str | None:
        """The reason of a failure, or None."""
        path = self.folder / FAILED
        return str(read_json(path)["why"]) if path.is_file() else None

    @property
    def num_steps(self) -> int:
        """Number of completed steps."""
        path = self.folder / RUN / METRICS
        # lines of evaluations have no loss
        return path.read_bytes().count(b'"loss": ') if path.is_file() else 0


def places(folder: Path, plan: Plan, num_prompts: int | None) -> list[Place]:
    """Create the folders of all trials of a plan, each with its trial.json."""
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
    """Run the trial of a folder in a subprocess; write failed.json if it fails."""
    (folder / FAILED).unlink(missing_ok=True)
    command = [sys.executable, "-m", "klinic.lab.ablation.trial", str(folder)]
    with open_log(folder / LOG) as log:
        process = subprocess.Popen(  # noqa: S603 - the running interpreter
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, PARENT: str(os.getpid())},
        )
        try:
            code = process.wait()
        except BaseException:
            process.wait()  # it got the same signal, saves and exits
            raise
    if not (folder / RESULT).is_file():
        said = (folder / LOG).read_text(errors="replace").strip()[-SPEAKS_LAST:]
        why = said.splitlines()[-1] if said else "it printed nothing"
        if code < 0:
            why = f"it was killed by signal {-code}; its last output was: {why}"
        write_atomically(folder / FAILED, json_bytes({"why": why, "exit_code": code}))


def work(folder: Path) -> None:
    """Train and evaluate the trial of a folder."""
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
        remove_tree(run)  # killed before there was a run to resume
    console = Console(file=sys.stdout, highlight=False)
    done = train(
        recipe, name=folder.name, given=Given(), start="resume" if begun else "new", console=console
    )
    if done.signal is not None:
        raise SystemExit(128 + done.signal)
    num = spec["num_prompts"] or recipe.loop.eval_prompts
    # trusted: the user passed this recipe, and its code has just run
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
    """Return the overrides common to all trials."""
    from klinic.recipe.loading import load

    own = [f"output.dir={run}", "output.trackers=[]"]
    kl = load(spec["recipe"], spec["overrides"]).recipe.kl
    if kl is not None and not kl.needs_reference:
        own.append(f"kl.monitor_every={WATCH_KL_EVERY}")  # only measures
    return own


def main() -> int:
    """Run the trial of the folder on the command line."""
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
