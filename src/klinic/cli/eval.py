"""`klinic eval`: compare a model with its starting point."""

from typing import TYPE_CHECKING, Annotated

import typer

from klinic.cli.printing import Json, print_json, print_line, require_modules
from klinic.cli.recorded_code import RunCode, announce_code
from klinic.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from klinic.training.compare import Evaluation

Checkpoint = Annotated[
    str | None,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A run folder, one of its checkpoints, a model folder or a hub id.",
        show_default=False,
    ),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="PATH", help="The same as CHECKPOINT."),
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
    checkpoint: Checkpoint = None,
    path: CheckpointOption = None,
    reference: Reference = None,
    prompts: Prompts = None,
    task: Task = None,
    num: Num = 200,
    run_code: RunCode = False,
    json: Json = False,
) -> None:
    """Measure accuracy, exact KL to the reference, and retention of other skills."""
    require_modules("train", "torch", "transformers", "peft", "safetensors", "datasets")
    from rich.console import Console

    from klinic.training.compare import evaluate_subject, find_subject

    subject = find_subject(choose_checkpoint(checkpoint, path), run_code=run_code)
    announce_code(subject.allowed, subject.refused)
    with Console(stderr=True).status("Evaluating ..."):
        evaluation = evaluate_subject(
            subject, reference=reference, prompts=prompts, task=task, num=num
        )
    if json:
        print_json("eval", ok=True, **_json_fields(evaluation))
    else:
        _print_evaluation(evaluation, Console(highlight=False))


def choose_checkpoint(checkpoint: str | None, path: str | None) -> str:
    """Return the checkpoint, which is an argument or an option."""
    if (checkpoint is None) == (path is None):
        raise ConfigError(
            "give one checkpoint, as an argument or with --checkpoint: a run folder "
            "(runs/arithmetic), one of its checkpoints, a model folder or a hub id."
        )
    return str(checkpoint if path is None else path)


def _json_fields(evaluation: "Evaluation") -> dict[str, object]:
    return {name: getattr(evaluation, name) for name in type(evaluation).__slots__}


def _print_evaluation(evaluation: "Evaluation", console: "Console") -> None:
    from rich import box
    from rich.table import Table

    print_line(console, f"Model: {evaluation.model}")
    if evaluation.reference is not None:
        print_line(console, f"Reference: {evaluation.reference}")
    if evaluation.accuracy:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("skill")
        for name in ("accuracy", "reference"):
            table.add_column(name, justify="right")
        for skill, value in evaluation.accuracy.items():
            before = evaluation.reference_accuracy
            label = f"{skill} (trained)" if skill == evaluation.trained else skill
            table.add_row(label, f"{value:.3f}", f"{before[skill]:.3f}" if before else "")
        console.print(table)
    if evaluation.reward is not None:
        start = evaluation.reference_reward
        was = "" if start is None else f" (reference {start:.4f})"
        print_line(console, f"Mean reward, greedy: {evaluation.reward:.4f}{was}")
    if evaluation.retention is not None:
        console.print(f"Retention of untrained skills: {evaluation.retention:.3f}")
    if evaluation.kl is not None:
        print_line(
            console,
            f"KL(model || reference): {evaluation.kl.per_token:.4f} nats per token, "
            f"{evaluation.kl.per_sequence:.4f} per completion, at "
            f"most {evaluation.kl.max_token:.2f} at a "
            f"token (exact over the vocabulary, {evaluation.kl.num_completions} completions)",
        )
