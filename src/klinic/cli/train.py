"""`klinic train`: GRPO as a recipe says."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from klinic.cli.extras import require

Recipe = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A YAML recipe.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE ...]",
        help="Keys to set on top of the recipe, such as kl.coef=0.02 or max_steps=50. Flags in the "
        "manner of other trainers work too: --kl-beta 0.02.",
        show_default=False,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run where it was stopped.")]

FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def train(recipe: Recipe, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train with GRPO and a KL penalty, and leave the evidence behind."""
    from klinic.recipe.loading import flags_to_overrides, load

    loaded = load(recipe, flags_to_overrides(overrides or []))
    require("train", "torch", "transformers", "peft", "safetensors", "datasets")
    from rich.console import Console

    console = Console(highlight=False)
    for echo in loaded.echoes:
        console.print(echo, markup=False, soft_wrap=True)
    for line in summary(loaded.recipe.model_dump(mode="json")):
        console.print(line, markup=False, style="dim", soft_wrap=not console.is_terminal)

    with console.status("Loading torch ..."):
        from klinic.loop.source import Given
        from klinic.loop.trackers.console import labels
        from klinic.loop.train import train as run

    result = run(loaded.recipe, name=loaded.name, given=Given(), resume=resume, console=console)
    if result.signal is not None:
        console.print(
            f"Stopped after step {result.step} of {result.folder} and saved. Go on with --resume.",
            soft_wrap=True,
        )
        raise typer.Exit(128 + result.signal)
    before = labels(result.before)
    for name, value in labels(result.after).items():
        was = f"{before[name]:.3f} -> " if name in before else ""
        console.print(f"{name}: {was}{value:.3f}")
    console.print(f"Model: {result.model}", soft_wrap=True)


def summary(recipe: dict[str, Any]) -> list[str]:
    """Return the resolved recipe, a line a section.

    >>> summary({"seed": 0, "kl": None, "model": {"name": "tiny", "compile": False}})
    ['seed=0 kl=null', 'model: name=tiny compile=false']
    """
    alone = {key: value for key, value in recipe.items() if not isinstance(value, dict)}
    sections = {key: value for key, value in recipe.items() if isinstance(value, dict)}
    return [_pairs(alone)] + [f"{name}: {_pairs(values)}" for name, values in sections.items()]


def _pairs(values: dict[str, Any]) -> str:
    return " ".join(f"{key}={_shown(value)}" for key, value in values.items())


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
