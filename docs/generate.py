"""The pages that repeat the source, made from it: `python docs/generate.py` writes them again.

A page is text by hand with tables between `<!-- table: NAME -->` and `<!-- end -->`; a test fails
where a table is not what the source says.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from klinic.checks import CHECKS
from klinic.cli.app import app
from klinic.doctor.scalars.examine import SIGNS
from klinic.evidence.readers.names import KLINIC, TRAINERS
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.recipe.aliases import ALIASES, REFUSED, resolve_alias

DOCS = Path(__file__).parent
EXAMPLES: dict[str, Any] = {  # of the names whose meaning depends on the value
    "bf16": True,
    "clip_range": 0.2,
    "cliprange": 0.2,
    "cluster.learners": 2,
    "dynamic_sampling": True,
    "epsilon": 0.2,
    "kl_penalty": 0.01,
    "kl_target": 0.05,
    "report_to": "wandb",
    "target_kl": 0.05,
    "use_kl_loss": False,
    "use_kl_penalty": True,
    "use_vllm": True,
    "vllm_server_base_url": "http://127.0.0.1:8000",
}
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def commands() -> str:
    """Return every command with its arguments and options, by the groups of `klinic --help`."""
    every: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines: list[str] = []
    for panel in dict.fromkeys(command.rich_help_panel for command in every.values()):
        lines += [f"## {panel}", ""]
        for name, command in every.items():
            if command.rich_help_panel == panel:
                lines += [f"### klinic {name}", "", command.help, ""]
                lines += [*table(("", "meaning"), parameters(command, name)), ""]
    return "\n".join(lines)


def parameters(command: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield what a command takes, as its own help says it."""
    context = command.context_class(command, info_name=name)
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in record[0]:
            yield f"`{shortened(record[0])}`", " ".join(record[1].split())


def shortened(written: str) -> str:
    """Return a parameter with its type where that says anything.

    >>> shortened("RECIPE <path>"), shortened("--num <int range>")
    ('RECIPE', '--num INT')
    """
    name, _, kind = written.strip().partition(" <")
    return f"{name} {kind.strip('>').split()[0].upper()}" if kind and name[0] == "-" else name


def estimators() -> str:
    """Return every KL term with the gradient that its name promises."""
    rows = (
        (f"`{e.name}`", e.kind, f"`{e.gradient.value}`", e.sentence) for e in ESTIMATORS.values()
    )
    return "\n".join([*table(("estimator", "kind", "gradient", "what to know"), rows), ""])


def checks() -> str:
    """Return every cause in one line, with the stage at which it is looked for."""
    rows = (
        (
            f"[{c.name}](#{c.name})",
            c.stage.name.lower().replace("_", " "),
            c.help_text.splitlines()[0],
        )
        for c in CHECKS
    )
    return "\n".join([*table(("cause", "stage", "what the check does"), rows), ""])


def cause_fields() -> str:
    """Return every cause with the fields that distinguish it from the others."""
    rows = (
        (
            f"`{c.name}`",
            c.description,
            listed(c.all_fields),
            c.not_recorded,
        )
        for c in CHECKS
    )
    return "\n".join([*table(("cause", "fault", "fields", "not recorded"), rows), ""])


def signs() -> str:
    """Return what scalars can show, and what would tell more."""
    rows = (
        (f"`{s.name}`", s.text.removeprefix("Look for ").rstrip("."), listed(s.decided_by))
        for s in SIGNS
    )
    return "\n".join([*table(("sign", "looks for", "its causes are told apart by"), rows), ""])


def names() -> str:
    """Return what each trainer calls what klinic knows."""
    trainers = (*(trainer for trainer in TRAINERS if trainer is not KLINIC), KLINIC)
    known = dict.fromkeys(name for trainer in trainers for name in trainer.names.values())
    rows = (
        (f"`{name}`", *(listed(k for k, v in t.names.items() if v == name) for t in trainers[:-1]))
        for name in known
    )
    heads = ("klinic", *(trainer.name for trainer in trainers[:-1]))
    return "\n".join([*table(heads, rows), ""])


def listed(words: Iterable[str]) -> str:
    """Return words as a table has them."""
    return ", ".join(f"`{word}`" for word in words)


def aliases() -> str:
    """Return the names of other trainers, and what each is here."""
    rows = sorted((written_as(name), said(name)) for name in ALIASES)
    return "\n".join([*table(("you write", "klinic writes"), iter(rows)), ""])


def written_as(name: str) -> str:
    """Return a familiar name, with a value where the meaning depends on it."""
    return f"`{name}: {shown(EXAMPLES[name])}`" if callable(ALIASES[name]) else f"`{name}`"


def said(name: str) -> str:
    """Return the keys that a familiar name sets."""
    target = ALIASES[name]
    if isinstance(target, str):
        return f"`{target}`"
    means = resolve_alias(name, EXAMPLES[name])
    sets = [f"`{key}: {shown(value)}`" for key, value in means.sets.items()]
    weaker = {**means.unless_explicit, **means.unless_set}
    sets += [f"`{key}: {shown(value)}` unless you say otherwise" for key, value in weaker.items()]
    return ", ".join(sets)


def shown(value: Any) -> str:
    """Return a value as a recipe has it."""
    return value if isinstance(value, str) else json.dumps(value)


def refused() -> str:
    """Return the names that have no counterpart, with what to set instead."""
    return "\n".join(
        [*table(("you write", "do this"), ((f"`{n}`", why) for n, why in REFUSED.items())), ""]
    )


def table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    """Return a table in Markdown."""
    cells = [heads, ("---",) * len(heads), *rows]
    return ["| " + " | ".join(escaped(cell) for cell in row) + " |" for row in cells]


def escaped(cell: str) -> str:
    """Return text that stays in its cell."""
    return cell.replace("|", r"\|")


TABLES: dict[str, Callable[[], str]] = {
    "commands": commands,
    "estimators": estimators,
    "checks": checks,
    "cause-fields": cause_fields,
    "signs": signs,
    "names": names,
    "aliases": aliases,
    "refused": refused,
}


def written(page: str) -> str:
    """Return a page with its tables made anew."""

    def made(found: re.Match[str]) -> str:
        make = TABLES.get(found[2])
        return found[0] if make is None else found[1] + make() + found[3]

    return TABLE.sub(made, page)


def pages() -> Iterator[Path]:
    """Yield the pages that have such a table."""
    for path in sorted(DOCS.rglob("*.md")):
        if any(f"<!-- table: {name} -->" in path.read_text() for name in TABLES):
            yield path


if __name__ == "__main__":
    for path in pages():
        path.write_text(written(path.read_text()))
