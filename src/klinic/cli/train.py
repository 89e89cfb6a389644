"""`klinic train`: GRPO training from a recipe."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klinic.cli.output import ignore_write_errors
from klinic.cli.printing import require_modules
from klinic.cli.supervisor import find_supervisor, supervise
from klinic.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from klinic.recipe.loading import LoadedRecipe
    from klinic.training.train import StartMode

Recipe = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A YAML recipe.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE ...]",
        help="Recipe keys to override, such as kl.coef=0.02 or max_steps=50. Flags of other "
        "trainers work too: --kl-beta 0.02.",
        show_default=False,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue a stopped run.")]
StartOver = Annotated[
    bool,
    typer.Option(
        "--start-over",
        help="Start again in the folder of a run; the old run is renamed to FOLDER.old-1.",
    ),
]

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Train nothing: show the resolved recipe, its sizes and its memory."
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus", min=1, help="With --dry-run: GPUs to shard the learner over.", show_default=False
    ),
]
GpuMemory = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory",
        min=1,
        help="With --dry-run: GB of each GPU; shows the free memory, also for vLLM.",
        show_default=False,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="With --dry-run: print one JSON object and nothing else.")
]

FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def train(  # noqa: PLR0913, PLR0917 - options of a command line
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    start_over: StartOver = False,
    dry_run: DryRun = False,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    as_json: Json = False,
) -> None:
    """Train with GRPO and a KL penalty, and record the evidence."""
    supervisor = find_supervisor()
    if resume and start_over:
        raise ConfigError(
            "--resume continues a run and --start-over begins a new one in its folder. Use one."
        )
    from klinic.recipe.loading import flags_to_overrides, load_recipe

    loaded = load_recipe(recipe, flags_to_overrides(overrides or []))
    require_modules("train", "torch", "transformers", "peft", "safetensors", "datasets")
    if dry_run:
        from klinic.cli import dry_run as dry

        machine = dry.machine_of(gpus, gpu_memory)
        if not as_json:
            _print_recipe(loaded)
        dry.dry_run(loaded, machine, as_json=as_json)
        return
    if gpus is not None or gpu_memory is not None or as_json:
        raise ConfigError(
            "--gpus, --gpu-memory and --json need --dry-run: a run follows its recipe. "
            "Add --dry-run, or omit them."
        )
    ignore_write_errors()
    console = _make_console() if supervisor else _print_recipe(loaded)  # the supervisor printed it
    if supervisor is None:
        raise typer.Exit(supervise(loaded))
    _run_training(loaded, console, "resume" if resume else "over" if start_over else "new")


def _make_console() -> "Console":
    from rich.console import Console

    return Console(highlight=False)


def _print_recipe(loaded: "LoadedRecipe") -> "Console":
    """Print the resolved recipe; return the console."""
    console = _make_console()
    for echo in loaded.notes:
        console.print(echo, markup=False, soft_wrap=True)
    for line in recipe_lines(loaded.recipe.model_dump(mode="json")):
        console.print(line, markup=False, style="dim", soft_wrap=not console.is_terminal)
    return console


def _run_training(loaded: "LoadedRecipe", console: "Console", start: "StartMode") -> None:
    if int(os.environ.get("RANK", "0")) > 0:  # started by torchrun, not rank 0
        from klinic.training.learner_process import main

        raise typer.Exit(main())
    with console.status("Loading torch ..."):
        from klinic.trackers.console import short_labels
        from klinic.training.source import PythonInputs
        from klinic.training.train import train as run

    result = run(
        loaded.recipe, name=loaded.name, inputs=PythonInputs(), start=start, console=console
    )
    if result.signal is not None:
        console.print(
            f"Stopped after step {result.step} of {result.folder} and saved. Go on with --resume.",
            soft_wrap=True,
        )
        raise typer.Exit(128 + result.signal)
    before = short_labels(result.before)
    for name, value in short_labels(result.after).items():
        was = f"{before[name]:.3f} -> " if name in before else ""
        console.print(f"{name}: {was}{value:.3f}")
    console.print(f"Model: {result.model}", soft_wrap=True)


def recipe_lines(recipe: dict[str, Any]) -> list[str]:
    """Return the resolved recipe, one line per section.

    >>> recipe_lines({"seed": 0, "kl": None, "model": {"name": "tiny", "compile": False}})
    ['seed=0 kl=null', 'model: name=tiny compile=false']
    """
    alone = {key: value for key, value in recipe.items() if not isinstance(value, dict)}
    sections = {key: value for key, value in recipe.items() if isinstance(value, dict)}
    return [_format_pairs(alone)] + [
        f"{name}: {_format_pairs(values)}" for name, values in sections.items()
    ]


def _format_pairs(values: dict[str, Any]) -> str:
    return " ".join(f"{key}={_format_value(value)}" for key, value in values.items())


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
