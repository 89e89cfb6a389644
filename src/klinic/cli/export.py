"""`klinic export`: write a trained model as a folder for other programs."""

from typing import TYPE_CHECKING, Annotated

import typer

from klinic.cli.extras import require
from klinic.cli.printing import Json, print_json
from klinic.cli.recorded_code import RunCode, announce_code, model_code

if TYPE_CHECKING:
    from klinic.loop.export import Exported

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A run folder, one of its checkpoints, a model or an adapter folder.",
        show_default=False,
    ),
]
To = Annotated[str, typer.Option(help="The folder to write; it must be new or empty.")]
Merge = Annotated[bool, typer.Option("--merge", help="Merge an adapter into its base.")]
WHAT = {
    "model": "a whole model",
    "adapter": "an adapter for {base}",
    "merged": "a whole model, its adapter merged into {base}",
}


def export(
    checkpoint: Checkpoint,
    to: To,
    merge: Merge = False,
    run_code: RunCode = False,
    json: Json = False,
) -> None:
    """Write a model folder for other programs, and verify that it equals the trained model."""
    require("train", "torch", "transformers", "peft", "safetensors", "datasets")
    from rich.console import Console

    from klinic.loop.compare import find_subject
    from klinic.loop.export import export_subject

    subject = find_subject(checkpoint, run_code=run_code)
    # the model is saved and loaded; no other function of the run is called
    announce_code(*(model_code(code) for code in (subject.allowed, subject.refused)))
    with Console(stderr=True).status("Exporting ..."):
        found = export_subject(subject, to=to, merge_adapter=merge)
    if json:
        fields = {name: getattr(found, name) for name in type(found).__slots__}
        print_json("export", ok=found.ok, **fields)
    else:
        _print(found)
    raise typer.Exit(0 if found.ok else 1)


def _print(found: "Exported") -> None:
    typer.echo(f"Model: {found.model}")
    if found.ok:
        typer.echo(f"Wrote: {found.to}, {WHAT[found.kind].format(base=found.base)}")
    typer.echo(
        f"Largest difference of a log-prob: {found.max_difference:.1e} (limit {found.limit:.0e}, "
        f"{found.num_log_probs} compared)"
    )
    if not found.ok:
        typer.echo(
            "The written model differs from the trained one, so it was deleted. Export without "
            "--merge if an adapter was merged; otherwise transformers saves this model incorrectly."
        )
