"""`klinic train`: GRPO training from a recipe."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klinic.cli.output import ignore_write_errors
from klinic.cli.printing import is_missing, require_modules
from klinic.cli.recorded_code import model_code
from klinic.cli.supervisor import find_supervisor, supervise
from klinic.errors import ConfigError
from klinic.runtime.import_speed import pause_collection

if TYPE_CHECKING:
    from rich.console import Console

    from klinic.recipe.loading import LoadedRecipe
    from klinic.training.result import Result
    from klinic.training.train import StartMode

Recipe = Annotated[
    Path | None, typer.Argument(metavar="RECIPE", help="A YAML recipe.", show_default=False)
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The same as RECIPE.", show_default=False),
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
    recipe: Recipe = None,
    overrides: Overrides = None,
    config: Config = None,
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

    path, words = choose_recipe(recipe, overrides or [], config)
    loaded = load_recipe(path, flags_to_overrides(words))
    require_modules("train", "torch", "transformers", "peft", "safetensors", "datasets")
    if dry_run:
        from klinic.cli import dry_run as dry

        machine = dry.machine_of(gpus, gpu_memory)
        if not as_json:
            _print_recipe(loaded, every=True)
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


def choose_recipe(
    recipe: Path | None, overrides: list[str], config: Path | None
) -> tuple[Path, list[str]]:
    """Return the recipe and the overrides: after `--config FILE` the first word is an override."""
    if config is not None:
        return config, [str(recipe), *overrides] if recipe is not None else overrides
    if recipe is None:
        raise ConfigError(
            "train needs a recipe: klinic train recipes/arithmetic.yaml. `klinic train --help` has "
            "more examples; two lines (`model: tiny` and `task: arithmetic`) are a recipe."
        )
    return recipe, overrides


def _make_console() -> "Console":
    from rich.console import Console

    return Console(highlight=False)


def _print_recipe(loaded: "LoadedRecipe", *, every: bool = False) -> "Console":
    """Print the settings that differ from their defaults, or all; return the console."""
    from klinic.cli.text_layout import print_text
    from klinic.recipe.changed import changed_settings

    console = _make_console()
    for note in loaded.notes:
        print_text(console, note)
    if every:
        lines = recipe_lines(loaded.recipe.model_dump(mode="json"))
    else:
        print_text(console, "Settings that differ from the defaults (`--dry-run` prints all):")
        lines = recipe_lines(_shorten_rewards(changed_settings(loaded.recipe)))
    indent = (0, 2) if every else (2, 4)
    for line in lines:
        print_text(console, line, style="dim", indent=indent)
    return console


def _shorten_rewards(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with each reward as its function and weight.

    >>> entries = [{"function": "f1", "weight": 1.0}, {"function": "form", "weight": 0.1}]
    >>> _shorten_rewards({"rewards": entries})
    {'rewards': 'f1 (weight 1.0), form (weight 0.1)'}
    """
    if "rewards" not in settings:
        return settings
    entries = [f"{one['function']} (weight {one['weight']})" for one in settings["rewards"]]
    return {**settings, "rewards": ", ".join(entries)}


def _run_training(loaded: "LoadedRecipe", console: "Console", start: "StartMode") -> None:
    if int(os.environ.get("RANK", "0")) > 0:  # started by torchrun, not rank 0
        from klinic.training.learner_process import main

        raise typer.Exit(main())
    with console.status("Loading torch ..."), pause_collection():
        from klinic.training.source import PythonInputs
        from klinic.training.train import train as run

    result = run(
        loaded.recipe, name=loaded.name, inputs=PythonInputs(), start=start, console=console
    )
    if result.signal is not None:
        _print_stopped(result, console)
        raise typer.Exit(128 + result.signal)
    _print_finished(result, console)


def _print_stopped(result: "Result", console: "Console") -> None:
    """Print where a stopped run is, and the command that continues it."""
    from klinic.cli.text_layout import print_commands, print_text

    print_text(console, f"Stopped after step {result.step} of {result.folder} and saved.")
    words = [word for word in sys.argv[1:] if word not in {"--resume", "--start-over"}]
    resume = shlex.join(["klinic", *words, "--resume"])
    print_commands(console, (resume, f"continue after step {result.step}"))


def _print_finished(result: "Result", console: "Console") -> None:
    """Print the held-out values before and after, the model, and the commands that read the run."""
    from klinic.cli.text_layout import print_commands, print_text
    from klinic.trackers.console import short_labels

    before = short_labels(result.before)
    for name, value in short_labels(result.after).items():
        was = f"{before[name]:.3f} -> " if name in before else ""
        if not console.is_terminal:  # there the table shows them
            print_text(console, f"{name}: {was}{value:.3f}")
    print_text(console, f"Model: {result.model}")
    print_commands(console, *next_commands(result.folder))


def next_commands(folder: Path) -> list[tuple[str, str]]:
    """Return the commands that read a finished run, with their purposes."""
    from klinic.checks import CHECKS
    from klinic.evidence.run_facts import RECIPE
    from klinic.recipe.recorded import load_recorded

    run = shlex.quote(str(folder))
    # the user has just run this code; other runs need the flag as well
    code = load_recorded(folder / RECIPE, run_code=False).refused
    flag = " --run-code" if code else ""
    model_flag = " --run-code" if model_code(code) else ""
    commands = []
    if (folder / "records").is_dir():
        commands = [
            (report_command(folder), "curves, and the KL of every token"),
            (f"klinic diagnose {run}", f"test {len(CHECKS)} possible causes"),
        ]
    model = shlex.quote(f"{folder.name}-model")
    return [
        *commands,
        (f"klinic eval {run}{flag}", "accuracy and exact KL against the start"),
        (f"klinic export {run} --to {model}{model_flag}", "a model folder for other programs"),
    ]


def report_command(folder: Path) -> str:
    """Return the report command that works with the installed packages."""
    terminal = " --terminal" if is_missing("matplotlib") else ""
    return f"klinic report {shlex.quote(str(folder))}{terminal}"


def recipe_lines(recipe: dict[str, Any]) -> list[str]:
    """Return the resolved recipe, one line per section.

    >>> recipe_lines({"seed": 0, "kl": {}, "model": {"name": "tiny", "compile": False}})
    ['seed=0', 'kl: on', 'model: name=tiny compile=false']
    """
    alone = {key: value for key, value in recipe.items() if not isinstance(value, dict)}
    sections = {key: value for key, value in recipe.items() if isinstance(value, dict)}
    return [_format_pairs(alone)] * bool(alone) + [
        f"{name}: {_format_pairs(values) or 'on'}" for name, values in sections.items()
    ]


def _format_pairs(values: dict[str, Any]) -> str:
    return " ".join(f"{key}={_format_value(value)}" for key, value in values.items())


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
