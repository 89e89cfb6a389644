"""Output of commands: one JSON object for machines, text for people, missing dependencies."""

import json
import math
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from klinic import __version__

if TYPE_CHECKING:
    from rich.console import Console

from importlib.util import find_spec

from klinic.errors import MissingExtraError

KB, MB, GB = 2**10, 2**20, 2**30
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def print_json(command: str, *, ok: bool, **content: Any) -> None:
    """Print the single JSON object of `--json`."""
    answer = {"klinic": __version__, "command": command, "ok": ok, **content}
    typer.echo(json.dumps(_to_json_value(answer), indent=2, allow_nan=False))


def print_line(console: "Console", text: str = "") -> None:
    """Print a line verbatim; a terminal breaks it between words."""
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


def _to_json_value(value: Any) -> Any:
    """Convert to JSON values; a non-finite float becomes its name."""
    if is_dataclass(value) and not isinstance(value, type):
        return _to_json_value(asdict(value))
    if isinstance(value, dict):
        return {str(key): _to_json_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def format_bytes(num_bytes: int) -> str:
    """Return bytes in GB with one decimal, in MB, or in KB.

    >>> [format_bytes(n) for n in (5 * 2**30 // 2, 3 * 2**20, 5 * 2**10, 7, 0)]
    ['2.5 GB', '3 MB', '5 KB', '< 1 KB', '0']
    """
    if num_bytes >= GB:
        return f"{num_bytes / GB:.1f} GB"
    for unit, name in ((MB, "MB"), (KB, "KB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.0f} {name}"
    return "< 1 KB" if num_bytes else "0"


def require_modules(extra: str, *modules: str) -> None:
    """Raise with the install command if a module of an extra is missing."""
    missing = [module for module in modules if is_missing(module)]
    if missing:
        raise MissingExtraError(
            f'this needs {", ".join(missing)}. Install it with: pip install "klinic[{extra}]"'
        )


def is_missing(module: str) -> bool:
    """Whether a module is not installed."""
    return find_spec(module) is None
