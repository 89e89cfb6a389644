"""`klinic explain NAME`: describes a check, its confirmation criteria, and the fix."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from klinic.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from klinic.checks import Check

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="A check, or a hypothesis H01 to H06; without one, all are listed."
    ),
]


All = Annotated[bool, typer.Option("--all", help="Print every check, as a page of Markdown.")]


def explain(name: Name = None, every: All = False) -> None:
    """Describe a check: its evidence, when it is confirmed or ruled out, and the fix."""
    from klinic.checks import CHECKS, HYPOTHESES

    checks = {check.name: check for check in CHECKS}
    if every:
        typer.echo(markdown_sections(CHECKS))
        return
    if name is None:
        for check in checks.values():
            typer.echo(f"{check.name}: {check.help_text.splitlines()[0]}")
        for number, names in HYPOTHESES.items():
            typer.echo(f"{number}: {', '.join(names)}")
        return
    if name.upper() in HYPOTHESES:
        _explain_all([checks[each] for each in HYPOTHESES[name.upper()]])
        return
    if name in checks:
        _explain_all([checks[name]])
    else:
        _explain_sign(name, list(checks))


def _explain_sign(name: str, checks: list[str]) -> None:
    """Describe a sign in a scalar log, and the fields that distinguish its causes."""
    from difflib import get_close_matches

    from klinic.doctor.scalars.examine import SIGNS

    signs = {sign.name: sign for sign in SIGNS}
    if name not in signs:
        near = get_close_matches(name, [*checks, *signs], n=1)
        hint = f"Did you mean {near[0]}?" if near else "`klinic explain` lists them."
        raise ConfigError(f"{name!r} is not a check. {hint}")
    sign = signs[name]
    fields = ", ".join(sign.decided_by)
    typer.echo(
        f"{name}, a sign in scalars\n\n{sign.text}\n\nFields that distinguish its causes: {fields}."
    )


def _explain_all(checks: "list[Check]") -> None:
    texts = [f"{check.name}\n\n{check.help_text}\nFix\n    {check.fix}" for check in checks]
    typer.echo("\n\n".join(texts))


def markdown_sections(checks: "Iterable[Check]") -> str:
    """Return checks as sections of a Markdown page."""
    return "\n".join(_markdown_section(check) for check in checks)


def _markdown_section(check: "Check") -> str:
    """Return a check as a Markdown section."""
    first, _, rest = check.help_text.partition("\n\n")
    lines = [f"## {check.name}", "", first, ""]
    for line in rest.splitlines():
        lines.append(line.strip() if line.startswith(" ") else f"\n**{line}**\n")
    needs = ", ".join(f"`{need}`" for need in check.needs + check.optional_needs)
    lines += ["", "**Fix**", "", check.fix, "", f"Needs {needs}.", ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
