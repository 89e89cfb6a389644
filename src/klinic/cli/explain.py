"""`klinic explain WORD`: describes a check, a setting, a metric or another word."""

import re
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from klinic.cli.hypotheses import HYPOTHESES
from klinic.cli.text_layout import print_numbered, print_text, print_title
from klinic.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console

    from klinic.checks import Check
    from klinic.doctor.scalars.check import ScalarCheck

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="WORD",
        help="A check, a sign of a log, a hypothesis H01 to H06, a recipe key, a setting of "
        "another trainer, a metric or another word; without one, all checks are listed.",
    ),
]


All = Annotated[bool, typer.Option("--all", help="Print every check, as a page of Markdown.")]


def explain(name: Name = None, every: All = False) -> None:
    """Describe a check (evidence, criteria, fix), a setting, a metric or another word."""
    from klinic.checks import CHECKS
    from klinic.checks import HYPOTHESES as GROUPS

    if every:
        typer.echo(markdown_sections(CHECKS))
        return
    console = _make_console()
    checks = {check.name: check for check in CHECKS}
    if name is None:
        _list_checks(checks.values(), GROUPS, console)
    elif name.upper() in GROUPS:
        _print_hypothesis(name.upper(), console)
        _print_checks([checks[each] for each in GROUPS[name.upper()]], console)
    elif _as_check_name(name) in checks:
        _print_checks([checks[_as_check_name(name)]], console)
    else:
        _explain_word(name, list(checks), console)


def _make_console() -> "Console":
    from rich.console import Console

    return Console(highlight=False)


def _as_check_name(word: str) -> str:
    return word.strip().lower().replace("_", "-").replace(" ", "-")


def _list_checks(
    checks: "Iterable[Check]", hypotheses: "Mapping[str, Sequence[str]]", console: "Console"
) -> None:
    """Print every check with its fault, by stage, and the hypotheses."""
    listed = sorted(checks, key=lambda check: check.stage)
    for stage, group in groupby(listed, key=lambda check: check.stage):
        print_title(console, f"{stage.name.capitalize()}:")
        for check in group:
            print_text(
                console,
                check.description,
                label=f"{check.name}: ",
                label_style="cyan",
                indent=(2, 6),
            )
    print_title(console, "Hypotheses about an exploding KL:")
    for number, names in hypotheses.items():
        print_text(
            console,
            f"{HYPOTHESES[number].title} ({', '.join(names)})",
            label=f"{number}: ",
            label_style="cyan",
            indent=(2, 6),
        )


def _print_hypothesis(number: str, console: "Console") -> None:
    hypothesis = HYPOTHESES[number]
    print_text(console, f"{number}, {hypothesis.title}", style="bold")
    print_text(console, hypothesis.priority, label="Priority: ", label_style="")
    console.print("Invalidated if")
    print_numbered(console, hypothesis.invalidated_by)
    console.print()


def _explain_word(word: str, checks: list[str], console: "Console") -> None:
    """Describe a sign in a scalar log, a setting, a metric or another word."""
    from klinic.cli.lookup import look_up
    from klinic.doctor.scalars.examine import SIGNS

    sign = next((sign for sign in SIGNS if sign.name == _as_check_name(word)), None)
    if sign is not None:
        _print_sign(sign, console)
        return
    paragraphs = look_up(word)
    names = [*checks, *(sign.name for sign in SIGNS)]
    if not paragraphs and not _print_mentions(word, names, console):
        raise ConfigError(_unknown_word(word, names))
    for paragraph in paragraphs:
        print_text(console, paragraph)


def _print_mentions(word: str, names: list[str], console: "Console") -> bool:
    """Print the entries that mention a word; return whether there are any.

    A word that is nearly a check or another known word is a typing error instead.
    """
    from klinic.cli.lookup import find_mentions

    mentions = find_mentions(word)
    if not mentions or _nearest(word, names):
        return False
    print_text(console, f"{word!r} has no entry of its own. Entries that mention it:")
    for name, text in mentions:
        print_text(console, text, label=f"{name}: ", label_style="cyan", indent=(2, 6))
    return True


def _nearest(word: str, names: list[str]) -> list[str]:
    """Return the known word that a word was probably meant to be."""
    from difflib import get_close_matches

    from klinic.cli.lookup import known_words

    near = get_close_matches(_as_check_name(word), names, n=1, cutoff=0.8)
    return near or get_close_matches(word.lower(), [*names, *known_words()], n=1, cutoff=0.8)


def _unknown_word(word: str, names: list[str]) -> str:
    near = _nearest(word, names)
    hint = f"Did you mean {near[0]}?" if near else "`klinic explain` lists the checks."
    return f"{word!r} is no check, setting or metric. {hint}"


def _print_sign(sign: "ScalarCheck", console: "Console") -> None:
    """Print a sign in a scalar log, and what to do about it."""
    print_text(console, f"{sign.name}, a sign in scalars", style="bold")
    console.print()
    print_text(console, sign.text)
    fields = ", ".join(sign.decided_by)
    console.print()
    print_text(console, f"Fields that distinguish its causes: {fields}.")
    console.print()
    console.print("What to do")
    print_numbered(
        console,
        (
            "klinic diagnose LOG: it lists the causes that fit the log, the likeliest first, with "
            "a fix for each in the settings of the trainer.",
            "Record tokens, which decide between them: klinic.attach(trainer) for TRL, "
            "klinic.Recorder for any other loop.",
        ),
    )


def _print_checks(checks: "list[Check]", console: "Console") -> None:
    """Print checks; a terminal gets paragraphs of its own width."""
    texts = [f"{check.name}\n\n{check.help_text}\nFix\n    {check.fix}" for check in checks]
    text = "\n\n".join(texts)
    if not console.is_terminal:
        typer.echo(text)
        return
    for indented, lines in groupby(text.splitlines(), key=lambda line: line[:1] in ("", " ")):
        if indented:
            _print_paragraphs(list(lines), console)
        else:
            for line in lines:
                print_text(console, line, style="bold")


def _print_paragraphs(lines: list[str], console: "Console") -> None:
    for is_empty, group in groupby(lines, key=lambda line: not line.strip()):
        if is_empty:
            console.print()
        else:
            print_text(console, " ".join(line.strip() for line in group), indent=(4, 4))


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
