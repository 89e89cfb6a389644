"""The `--run-code` option: announces which code of a run folder is executed or skipped."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from klinic.cli.plain_text import echo_text

if TYPE_CHECKING:
    from klinic.recipe.recorded import NamedCode

# repeated from recipe/recorded.py, which imports NumPy: --help must stay fast
FLAG = "--run-code"
MODEL_CODE = "model.trust_remote_code"
RunCode = Annotated[
    bool,
    typer.Option(
        FLAG, help="Run the code that the run's own recipe names. Only for runs you trust."
    ),
]


def announce_code(allowed: "Sequence[NamedCode]", refused: "Sequence[NamedCode]") -> None:
    """Print to stderr which code of a recorded recipe is executed and which is skipped."""
    if allowed:
        _print_stderr("Running code that the run's recipe.yaml names:")
        for code in allowed:
            _print_stderr(f"  {code}")
    for code in refused:
        left_out = "is ignored" if code.key == MODEL_CODE else "is not run"
        _print_stderr(
            f"{code} {left_out}: the run's recipe.yaml names it, and code from a run folder is not "
            f"run by default. Pass {FLAG} if you trust the author of the run."
        )


def model_code(code: "Sequence[NamedCode]") -> "list[NamedCode]":
    """Return the code that belongs to the model, for commands that call no recipe function."""
    return [one for one in code if one.key == MODEL_CODE]


def _print_stderr(line: str) -> None:
    echo_text(line, err=True)
