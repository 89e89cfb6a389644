"""`klinic eval`: compare a model with its starting point."""

from typing import TYPE_CHECKING, Annotated

import typer

from klinic.cli.extras import require
from klinic.cli.printing import Json, print_json, say
from klinic.cli.recorded_code import RunCode, announce_code

if TYPE_CHECKING:
    from rich.console import Console

    from klinic.loop.compare import Evaluation

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A run folder, one of its checkpoints, a model folder or a hub id.",
        show_default=False,
    ),
]
Reference = Annotated[
    str | None,
    typer.Option(help="Compare with this model instead of the one the run started from."),
]
Prompts = Annotated[
    str | None, typer.Option(help="Measure the KL on the prompts of this file (.jsonl, ...).")
]
Task = Annotated[str | None, typer.Option(help="Measure accuracy on this task.")]
Num = Annotated[int, typer.Option(min=1, help="Held-out prompts, for each skill.")]


def evaluate(  # noqa: PLR0913, PLR0917 - options of a command line
    checkpoint: Checkpoint,
    reference: Reference = None,
    prompts: Prompts = None,
    task: Task = None,
    num: Num = 200,
    run_code: RunCode = False,
    json: Json = False,
) -> None:
    """Measure accuracy, exact KL to the reference, and retention of other skills."""
    require("train", "torch", "transformers", "peft", "safetensors", "datasets")
    from rich.console import Console

    from klinic.loop.compare import evaluate_subject, find_subject

    subject = find_subject(checkpoint, run_code=run_code)
    announce_code(subject.allowed, subject.refused)
    with Console(stderr=True).status("Evaluating ..."):
        found = evaluate_subject(subject, reference=reference, prompts=prompts, task=task, num=num)
    if json:
        print_json("eval", ok=True, **_fields(found))
    else:
        _print(found, Console(highlight=False))


def _fields(found: "Evaluation") -> dict[str, object]:
    return {name: getattr(found, name) for name in type(found).__slots__}


def _print(found: "Evaluation", console: "Console") -> None:
    from rich import box
    from rich.table import Table

    say(console, f"Model: {found.model}")
    if found.reference is not None:
        say(console, f"Reference: {found.reference}")
    if found.accuracy:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("skill")
        for name in ("accuracy", "reference"):
            table.add_column(name, justify="right")
        for skill, value in found.accuracy.items():
            before = found.reference_accuracy
            label = f"{skill} (trained)" if skill == found.trained else skill
            table.add_row(label, f"{value:.3f}", f"{before[skill]:.3f}" if before else "")
        console.print(table)
    if found.reward is not None:
        start = found.reference_reward
        was = "" if start is None else f" (reference {start:.4f})"
        console.print(f"Mean reward, greedy: {found.reward:.4f}{was}", soft_wrap=True)
    if found.retention is not None:
        console.print(f"Retention of untrained skills: {found.retention:.3f}")
    if found.kl is not None:
        console.print(
            f"KL(model || reference): {found.kl.per_token:.4f} nats per token, "
            f"{found.kl.per_sequence:.4f} per completion, at most {found.kl.max_token:.2f} at a "
            f"token (exact over the vocabulary, {found.kl.num_completions} completions)",
            soft_wrap=True,
        )
