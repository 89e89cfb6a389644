"""`klinic train`: GRPO as a recipe says."""

from pathlib import Path
from typing import Annotated

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
    from klinic.recipe.loading import dump, flags_to_overrides, load

    loaded = load(recipe, flags_to_overrides(overrides or []))
    require("train", "torch", "transformers", "peft", "safetensors", "datasets")
    from rich.console import Console

    console = Console(highlight=False)
    for echo in loaded.echoes:
        console.print(echo, markup=False, soft_wrap=True)
    console.print(dump(loaded.recipe), markup=False, style="dim", soft_wrap=True)

    from klinic.loop.source import Given
    from klinic.loop.train import train as run

    result = run(loaded.recipe, name=loaded.name, given=Given(), resume=resume, console=console)
    if result.signal is not None:
        console.print(f"Stopped at step {result.step} and saved. Go on with --resume.")
        raise typer.Exit(128 + result.signal)
    for name, value in result.after.items():
        was = result.before.get(name)
        before = "" if was is None else f"{was:.3f} -> "
        console.print(f"{name.removeprefix('eval/')}: {before}{value:.3f}")
    console.print(f"Model: {result.model}", soft_wrap=True)
