"""The doctor on runs of TRL, sick and well: how often the cause is named first, and false alarms.

    python -m bench.trl_scoreboard FOLDER [--seeds 3] [--only NAME ...] [--table]

Runs are a few steps of the tiny model from the start of the scoreboard's trials. Every outcome is a
line of FOLDER/outcomes.jsonl; an interrupted scoreboard goes on when it is started again. What TRL
itself logs in each run is kept in FOLDER/logs, for those who read nothing else.
"""

import argparse
import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

import klinic
from bench.trl_logs import log_of
from klinic.evidence.files import Journal
from klinic.faults.in_trl import TRL_FAULTS, TrlFault
from klinic.lab.scoreboard_outcome import HEALTHY, diagnose_run
from klinic.lab.scoreboard_run import TRIAL_SETTINGS
from klinic.recipe.loading import from_keywords
from klinic.tasks.arithmetic.task import TASK
from klinic.training.build import start_policy
from klinic.training.run_folder import START_FOLDER
from klinic.training.source import PythonInputs, load_task_data

STEPS = 6
OUTCOMES = "outcomes.jsonl"
HEALTHY_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "beta 0": {"beta": 0.0},
    "beta 1": {"beta": 1.0},
    "no bias correction": {"use_bias_correction_kl": False},
    "grpo": {"loss_type": "grpo", "scale_rewards": "group"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "batch spread": {"scale_rewards": "batch"},
    "accumulation": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4},
    "two iterations": {"num_iterations": 2},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.3": {"temperature": 1.3},
    "top-k said": {"top_k": 10},
    "top-p said": {"top_p": 0.9},
    "slow": {"learning_rate": 3e-6},
    "truncated rows masked": {"mask_truncated_completions": True},
    "synced reference": {"sync_ref_model": True, "ref_model_sync_steps": 2},
    "LoRA": {"peft": True, "learning_rate": 3e-3},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run: a fault or a healthy variant, and a seed."""

    cause: str
    name: str
    seed: int
    fault: TrlFault | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What other models and tasks need, below what the fault or the variant sets."""
    reward: Callable[..., Any] | None = None
    rows: Sequence[Mapping[str, Any]] = field(default_factory=lambda: TASK.train_rows("addition"))


def trials(seeds: int) -> Iterator[Trial]:
    """Yield all runs, seed by seed."""
    for seed in range(seeds):
        for fault in TRL_FAULTS:
            yield Trial(cause=fault.cause, name=fault.mechanism, seed=seed, fault=fault)
        for name in HEALTHY_SETTINGS:
            yield Trial(cause=HEALTHY, name=name, seed=seed)


def graded(completions: Any, answer: Any, **_: Any) -> list[float]:
    """Half a point for the right length, and half for the right answer."""
    pairs = zip(completions, answer, strict=True)
    return [0.5 * (len(said) == len(want)) + 0.5 * (said == want) for said, want in pairs]


def right(completions: Any, answer: Any, **_: Any) -> list[float]:
    """Whether answers are right, to be measured and not to be learnt from."""
    return [float(said == wanted) for said, wanted in zip(completions, answer, strict=True)]


def trainer_of(trial: Trial, start: Path, output: Path) -> Any:
    """Return the trainer of a run, with its fault at work."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    fault = trial.fault
    own = HEALTHY_SETTINGS[trial.name] if fault is None else fault.settings
    settings = {**trial.settings, **own}
    parts = _adapter() if settings.pop("peft", False) else {}
    rows = [dict(row) for row in trial.rows]
    how: dict[str, Any] = {
        "output_dir": str(output),
        "seed": trial.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "beta": 0.05,
        "max_steps": STEPS,
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": 8,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "scale_rewards": "none",
        "loss_type": "dr_grpo",
        "reward_weights": [1.0, 0.0],
        "eval_strategy": "steps",
        "eval_steps": STEPS // 2,
        "per_device_eval_batch_size": 32,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    reward = (fault.reward if fault is not None else None) or trial.reward or graded
    trainer = GRPOTrainer(
        str(start),
        reward_funcs=[reward, right],
        args=GRPOConfig(**{**how, **settings}),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:8]),
        **parts,
    )
    if fault is not None:
        fault.sabotage(trainer)
    return trainer


def _adapter() -> dict[str, Any]:
    from peft import LoraConfig

    return {"peft_config": LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")}


def parse(text: str) -> str | None:
    """Return the answer in a completion."""
    return text if text.isdigit() else None


def outcome(trial: Trial, start: Path, folder: Path) -> dict[str, Any]:
    """Train, and return what was named."""
    run = folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    error = None
    try:
        trainer = trainer_of(trial, start, folder / "out")
        quiet = Console(file=io.StringIO())
        attached = klinic.attach(
            trainer, run, parse=parse, accuracy="right", monitor_kl_every=1, console=quiet
        )
        with contextlib.redirect_stdout(io.StringIO()), attached:
            trainer.train()
        trainer.state.save_to_json(str(_log_of(trial, folder.parent)))
    except Exception as thrown:
        error = f"{type(thrown).__name__}: {thrown}"[:300]
    named, ranked, missing = None, (), ()
    with contextlib.suppress(Exception):
        found, ranked = diagnose_run(run)
        named, missing = found.cause, found.missing
    return {
        "cause": trial.cause,
        "name": trial.name,
        "seed": trial.seed,
        "named": named,
        "ranked": list(ranked),
        "missing": list(missing),
        "error": error,
    }


def _log_of(trial: Trial, folder: Path) -> Path:
    path = log_of(folder, cause=trial.cause, name=trial.name, seed=trial.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def summary(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rates."""
    sick = [o for o in outcomes if o["cause"] != HEALTHY]
    well = [o for o in outcomes if o["cause"] == HEALTHY]
    num = max(len(sick), 1)
    return {
        "trainer": "trl",
        "cases": len(sick),
        "top1": sum(o["named"] == o["cause"] for o in sick) / num,
        "top3": sum(o["cause"] in o["ranked"][:3] for o in sick) / num,
        "abstained": sum(o["named"] is None for o in sick) / num,
        "wrong": sum(o["named"] not in (None, o["cause"]) for o in sick) / num,
        "healthy_runs": len(well),
        "false_alarms": sum(o["named"] is not None for o in well),
        "not_first": [o for o in sick if o["named"] != o["cause"]],
        "alarms": [o for o in well if o["named"] is not None],
    }


def main() -> None:
    """Make what has no outcome yet, and print the rates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(given.folder / OUTCOMES)
    if not given.table:
        start = made_start(given.folder)
        done = {(o["cause"], o["name"], o["seed"]) for o in journal.entries()}
        for trial in trials(given.seeds):
            wanted = not given.only or trial.cause in given.only
            if wanted and (trial.cause, trial.name, trial.seed) not in done:
                journal.append(outcome(trial, start, given.folder / "trial"))
    print(json.dumps(summary(list(journal.entries())), indent=1))  # noqa: T201


def made_start(folder: Path) -> Path:
    """Return the model that all runs start from."""
    if not (folder / START_FOLDER).is_dir():
        recipe = from_keywords(**TRIAL_SETTINGS).recipe
        start_policy(recipe, folder, load_task_data(recipe, PythonInputs()), Console(quiet=True))
    return folder / START_FOLDER


if __name__ == "__main__":
    main()
