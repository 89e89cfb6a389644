"""What the rebuilt threads stand on: a tiny model that half knows sums, and runs of TRL's trainer.

The model writes digits and an end, and forgets to carry more often than not, so there is something
to learn from the first step on. Learning rates of the threads are for billions of weights; at this
size a healthy one is some hundred times higher, and ratios between rates are kept.
"""

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import klinic
from klinic.lab.scoreboard_run import TRIAL_SETTINGS
from klinic.recipe.loading import from_keywords
from klinic.tasks.arithmetic.task import TASK
from klinic.training.build import start_policy
from klinic.training.run_folder import START_FOLDER
from klinic.training.source import PythonInputs, load_task_data

LOG = "trainer_state.json"
WARM_START = {"warm_start.steps": 900, "warm_start.batch_size": 64}
"""As in recipes/arithmetic.yaml: over a half of the sums come out right."""


def beside(folder: Path) -> Path:
    """Return where a run keeps what is not klinic's: its first weights, and TRL's own log."""
    work = folder.with_name(f"{folder.name}.trl")
    work.mkdir(parents=True, exist_ok=True)
    return work


def start(folder: Path) -> Path:
    """Return the model that a run starts from."""
    recipe = from_keywords(**{**TRIAL_SETTINGS, **WARM_START}).recipe
    start_policy(
        recipe, beside(folder), load_task_data(recipe, PythonInputs()), Console(quiet=True)
    )
    return beside(folder) / START_FOLDER


def questions(skill: str = "addition") -> list[dict[str, str]]:
    """Return prompts with their answers."""
    return [dict(row) for row in TASK.train_rows(skill)]


def dataset(rows: Sequence[dict[str, str]]) -> Any:
    """Return rows as TRL takes them."""
    from datasets import Dataset

    return Dataset.from_list(list(rows))


def config(folder: Path, seed: int, **given: Any) -> Any:
    """Return TRL's settings for one core: 8 prompts of 8 completions a step, and what is given."""
    from trl import GRPOConfig

    how: dict[str, Any] = {
        "output_dir": str(beside(folder) / "out"),
        "seed": seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_completion_length": 8,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOConfig(**{**how, **given})


def right(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1 for the right answer and 0 for all others."""
    return [float(said == wanted) for said, wanted in zip(completions, answer, strict=True)]


def digits(completions: Sequence[str], **_: Any) -> list[float]:
    """Return 1 for a number and 0 for all else: the format, whatever it says."""
    return [float(said.isdigit()) for said in completions]


def parse(text: str) -> str | None:
    """Return the answer in a completion."""
    return text if text.isdigit() else None


def run(
    trainer: Any,
    folder: Path,
    *,
    accuracy: str | None = None,
    parse: Callable[[str], str | None] = parse,
) -> None:
    """Train with klinic beside the trainer, and keep what the trainer says of itself."""
    quiet = Console(file=io.StringIO())
    try:
        with (
            klinic.attach(
                trainer, folder, parse=parse, accuracy=accuracy, monitor_kl_every=1, console=quiet
            ),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            trainer.train()
    finally:
        trainer.state.save_to_json(str(beside(folder) / LOG))
