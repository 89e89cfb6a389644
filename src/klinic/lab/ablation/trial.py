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
from klinic.lab.ablation.plan import MONITOR_KL_EVERY, Plan, Trial, setting_overrides
from klinic.runtime.process_tree import PARENT_PID_VARIABLE, die_with_parent

SPEC, RESULT, FAILED = "trial.json", "result.json", "failed.json"
RUN, LOG = "run", "log.txt"
LOG_TAIL_LENGTH = 400  # characters of a failed trial's log that are searched for its last line


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFolder:
    """A trial and its folder."""

    trial: Trial
    path: Path

    @property
    def is_finished(self) -> bool:
        """Whether it has been trained and evaluated."""
        return (self.path / RESULT).is_file()

    @property
    def failure(self) -> str | None:
        """The reason of a failure, or None."""
        path = self.path / FAILED
        return str(read_json(path)["why"]) if path.is_file() else None

    @property
    def num_steps(self) -> int:
        """Number of completed steps."""
        path = self.path / RUN / METRICS
        # lines of evaluations have no loss
        return path.read_bytes().count(b'"loss": ') if path.is_file() else 0


def create_trial_folders(folder: Path, plan: Plan, num_prompts: int | None) -> list[TrialFolder]:
    """Create the folders of all trials of a plan, each with its trial.json."""
    trial_folders = []
    for trial in plan.trials():
        trial_folder = TrialFolder(trial=trial, path=folder / trial.folder)
        trial_folder.path.mkdir(parents=True, exist_ok=True)
        spec = {
            "recipe": str((folder / RECIPE).resolve()),
            "overrides": [
                *setting_overrides(plan, trial.setting, trial.start),
                f"seed={trial.seed}",
            ],
            "setting": trial.setting.name,
            "seed": trial.seed,
            "start": trial.start,
            "num_prompts": num_prompts,
        }
        write_atomically(trial_folder.path / SPEC, json_bytes(spec))
        trial_folders.append(trial_folder)
    return trial_folders


def run_in_subprocess(folder: Path) -> None:
    """Run the trial of a folder in a subprocess; write failed.json if it fails."""
    (folder / FAILED).unlink(missing_ok=True)
    command = [sys.executable, "-m", "klinic.lab.ablation.trial", str(folder)]
    with open_log(folder / LOG) as log:
        process = subprocess.Popen(  # noqa: S603 - the running interpreter
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, PARENT_PID_VARIABLE: str(os.getpid())},
        )
        try:
            code = process.wait()
        except BaseException:
            process.wait()  # it got the same signal, saves and exits
            raise
    if not (folder / RESULT).is_file():
        log_tail = (folder / LOG).read_text(errors="replace").strip()[-LOG_TAIL_LENGTH:]
        why = log_tail.splitlines()[-1] if log_tail else "it printed nothing"
        if code < 0:
            why = f"it was killed by signal {-code}; its last output was: {why}"
        write_atomically(folder / FAILED, json_bytes({"why": why, "exit_code": code}))


def run_trial(folder: Path) -> None:
    """Train and evaluate the trial of a folder."""
    from rich.console import Console

    from klinic.lab.ablation.measures import measure_run
    from klinic.recipe.loading import load_recipe
    from klinic.training.compare import evaluate_subject, find_subject
    from klinic.training.source import PythonInputs
    from klinic.training.train import train

    spec, run = read_json(folder / SPEC), folder / RUN
    recipe = load_recipe(spec["recipe"], [*spec["overrides"], *_common_overrides(spec, run)]).recipe
    begun = (run / RECIPE).is_file()
    if not begun:
        remove_tree(run)  # killed before there was a run to resume
    console = Console(file=sys.stdout, highlight=False)
    done = train(
        recipe,
        name=folder.name,
        inputs=PythonInputs(),
        start="resume" if begun else "new",
        console=console,
    )
    if done.signal is not None:
        raise SystemExit(128 + done.signal)
    num = spec["num_prompts"] or recipe.loop.eval_prompts
    # trusted: the user passed this recipe, and its code has just run
    evaluation = evaluate_subject(
        find_subject(str(run), run_code=True), reference=None, prompts=None, task=None, num=num
    )
    result = {
        "setting": spec["setting"],
        "seed": spec["seed"],
        **({} if spec["start"] is None else {"start": spec["start"]}),
        "steps": done.step,
        **measure_run(run, evaluation),
    }
    write_atomically(folder / RESULT, json_bytes(result))


def _common_overrides(spec: dict[str, Any], run: Path) -> list[str]:
    """Return the overrides common to all trials."""
    from klinic.recipe.loading import load_recipe

    own = [f"output.dir={run}", "output.trackers=[]"]
    kl = load_recipe(spec["recipe"], spec["overrides"]).recipe.kl
    if kl is not None and not kl.needs_reference:
        own.append(f"kl.monitor_every={MONITOR_KL_EVERY}")  # only measures
    return own


def main() -> int:
    """Run the trial of the folder on the command line."""
    if PARENT_PID_VARIABLE in os.environ:
        die_with_parent(int(os.environ.pop(PARENT_PID_VARIABLE)))
    try:
        run_trial(Path(sys.argv[1]))
    except KlinicError as error:
        sys.stdout.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
