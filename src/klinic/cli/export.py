"""`klinic export`: write a trained model as a folder for other programs."""

from typing import TYPE_CHECKING, Annotated

import typer

from klinic.cli.eval import CheckpointOption, choose_checkpoint
from klinic.cli.printing import Json, print_json, print_line, require_modules
from klinic.cli.recorded_code import RunCode, announce_code, model_code

if TYPE_CHECKING:
    from klinic.training.export import ExportResult

Checkpoint = Annotated[
    str | None,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A run folder, one of its checkpoints, a model or an adapter folder.",
        show_default=False,
    ),
]
To = Annotated[
    str,
    typer.Option(
        *("--to", "-o"),
        metavar="FOLDER",
        help="The folder to write; it must be new or empty.",
        show_default=False,
    ),
]
Merge = Annotated[bool, typer.Option("--merge", help="Merge an adapter into its base.")]
KIND_TEXT = {
    "model": "a whole model",
    "adapter": "an adapter for {base}",
    "merged": "a whole model, its adapter merged into {base}",
}


def export(
    to: To,
    checkpoint: Checkpoint = None,
    path: CheckpointOption = None,
    merge: Merge = False,
    run_code: RunCode = False,
    json: Json = False,
) -> None:
    """Write a model folder for other programs, and verify that it equals the trained model."""
    require_modules("train", "torch", "transformers", "peft", "safetensors", "datasets")
    from rich.console import Console

    from klinic.training.compare import find_subject
    from klinic.training.export import export_subject

    subject = find_subject(choose_checkpoint(checkpoint, path), run_code=run_code)
    # the model is saved and loaded; no other function of the run is called
    announce_code(*(model_code(code) for code in (subject.allowed, subject.refused)))
    with Console(stderr=True).status("Exporting ..."):
        exported = export_subject(subject, to=to, merge_adapter=merge)
    if json:
        fields = {name: getattr(exported, name) for name in type(exported).__slots__}
        print_json("export", ok=exported.ok, **fields)
    else:
        _print_summary(exported)
    raise typer.Exit(0 if exported.ok else 1)


def _print_summary(exported: "ExportResult") -> None:
    from rich.console import Console

    console = Console(highlight=False)
    print_line(console, f"Model: {exported.model}")
    if exported.ok:
        kind = KIND_TEXT[exported.kind].format(base=exported.base)
        print_line(console, f"Wrote: {exported.to}, {kind}")
    print_line(
        console,
        f"Largest difference of a log-prob: {exported.max_difference:.1e} "
        f"(limit {exported.limit:.0e}, "
        f"{exported.num_log_probs} compared)",
    )
    if not exported.ok:
        print_line(
            console,
            "The written model differs from the trained one, so it was deleted. Export without "
            "--merge if an adapter was merged; otherwise transformers saves this model "
            "incorrectly.",
        )
