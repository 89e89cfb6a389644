"""`klinic explain NAME`: what a check looks for, when it is confirmed, and the fix."""

from typing import Annotated

import typer

from klinic.errors import ConfigError

Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="A check; without one, all are listed.")
]


def explain(name: Name = None) -> None:
    """Say what a check looks for, when it is confirmed or ruled out, and the fix."""
    from difflib import get_close_matches

    from klinic.checks import CHECKS

    checks = {check.name: check for check in CHECKS}
    if name is None:
        for check in checks.values():
            typer.echo(f"{check.name}: {check.text.splitlines()[0]}")
        return
    if name not in checks:
        near = get_close_matches(name, checks, n=1)
        hint = f"Did you mean {near[0]}?" if near else "`klinic explain` lists them."
        raise ConfigError(f"{name!r} is no check. {hint}")
    check = checks[name]
    typer.echo(f"{check.name}\n\n{check.text}\nFix\n    {check.fix}")
