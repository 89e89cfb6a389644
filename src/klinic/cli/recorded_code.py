"""`--run-code`: say which code of a run folder runs, or that it does not, before anything else."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from klinic.harmless import harmless

if TYPE_CHECKING:
    from klinic.recipe.recorded import NamedCode

# as in recipe/recorded.py, which NumPy comes with: --help need not wait for it
FLAG = "--run-code"
MODEL_CODE = "model.trust_remote_code"
RunCode = Annotated[
    bool,
    typer.Option(
        FLAG, help="Run the code that the run's own recipe names. Only for runs that you trust."
    ),
]


def announce_code(allowed: "Sequence[NamedCode]", refused: "Sequence[NamedCode]") -> None:
    """Print to stderr which code of a recorded recipe will run, and which is left out."""
    if allowed:
        _print("Running code that the run's recipe.yaml names:")
        for code in allowed:
            _print(f"  {code}")
    for code in refused:
        left_out = "is ignored" if code.key == MODEL_CODE else "is not run"
        _print(
            f"{code} {left_out}: the run's recipe.yaml names it, and a run folder runs no code. "
            f"Give {FLAG} if you trust whoever made the run."
        )


def model_code(code: "Sequence[NamedCode]") -> "list[NamedCode]":
    """Return what comes with the model, for a command that calls no function of a recipe."""
    return [one for one in code if one.key == MODEL_CODE]


def _print(line: str) -> None:
    typer.echo(harmless(line), err=True)
