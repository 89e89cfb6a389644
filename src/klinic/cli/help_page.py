"""Help pages: commands by group with whole descriptions, options, and examples.

Text wraps between words at the width of the terminal, at most `MAX_WIDTH`; typer's own pages cut
descriptions and have no groups without its rich pages, whose import takes longer than the command.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from klinic.cli.plain_text import wrap_words

UsageError: Any = typer.BadParameter.__base__  # of click, or of the copy of it in newer typer
MAX_WIDTH, MIN_WIDTH = 100, 40
MAX_LABEL = 26  # columns; a longer label has its text on the next line
GAP = 2  # columns between a label and its text
OTHER_NAMES = {
    "behave": "check",
    "anonymise": "bundle",
    "anonymize": "bundle",
    "benchmark": "eval",
    "compare": "report",
    "dashboard": "watch",
    "diff": "report",
    "debug": "diagnose",
    "doctor": "diagnose",
    "dry-run": "train",
    "evaluate": "eval",
    "evaluation": "eval",
    "fit": "train",
    "grpo": "train",
    "help": "--help",
    "import": "convert",
    "info": "explain",
    "inspect": "diagnose",
    "list": "explain",
    "logs": "watch",
    "merge": "export",
    "monitor": "watch",
    "plot": "report",
    "prove": "verify",
    "push": "export",
    "redact": "bundle",
    "resume": "train",
    "run": "train",
    "save": "export",
    "sft": "train",
    "share": "bundle",
    "start": "train",
    "sweep": "ablate",
    "tail": "watch",
    "test": "check",
    "tune": "ablate",
    "validate": "check",
    "version": "--version",
    "visualize": "report",
}
"""Names of commands elsewhere, with the command or option that does the same here."""
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("klinic demo", "train a tiny model on this CPU, in about a minute"),
        ("klinic demo --fault stale-sampler", "break it on purpose: cause, fix and proof"),
        ("klinic diagnose runs/arithmetic", "a run of klinic, or the log of another trainer"),
    ),
    "train": (
        ("klinic train recipes/arithmetic.yaml", "a recipe that needs no GPU and no download"),
        ("klinic train recipes/arithmetic.yaml kl.coef=0.02", "with another coefficient"),
        ("klinic train recipes/arithmetic.yaml --resume", "continue the newest run"),
        ("klinic train recipes/arithmetic.yaml --dry-run", "sizes and memory, without training"),
    ),
    "eval": (
        ("klinic eval runs/arithmetic", "the last checkpoint against the start of the run"),
        ("klinic eval runs/arithmetic --num 50 --json", "fewer prompts, for a script"),
    ),
    "ablate": (
        (
            "klinic ablate recipes/arithmetic.yaml --vary kl.coef=0,0.01,0.1 --seeds 3",
            "three coefficients, three seeds each",
        ),
        ("klinic ablate --plot ablations/arithmetic", "redraw from finished trials"),
    ),
    "export": (
        ("klinic export runs/arithmetic --to model", "the last checkpoint of a run"),
        ("klinic export runs/lora --to model --merge", "with its adapter merged"),
    ),
    "check": (
        ("klinic check recipes/arithmetic.yaml", "every part, on two small batches"),
        ("klinic check --trl train.py:make_trainer", "a trainer of TRL that your function returns"),
        ("klinic check recipes/arithmetic.yaml --device cuda", "the accelerator as well"),
    ),
    "verify": (
        ("klinic verify", "every KL term of klinic"),
        ("klinic verify direction", "k3 and its reversed form against the exact KL"),
        ("klinic verify my_kl.py:kl", "a function of your own"),
    ),
    "diagnose": (
        ("klinic diagnose runs/arithmetic", "the cause, its evidence and its fix"),
        ("klinic diagnose runs/arithmetic --prove", "replay the step of the cause with one change"),
        ("klinic diagnose output/trainer_state.json", "the log of another trainer"),
    ),
    "convert": (
        ("klinic convert output runs/output", "any run that `klinic diagnose` reads"),
        ("klinic convert dump_details runs/slime", "a dump of slime or miles, where torch is"),
    ),
    "explain": (
        ("klinic explain", "all checks, by stage"),
        ("klinic explain stale-sampler", "a check: evidence, criteria and fix"),
        ("klinic explain kl_coef", "a setting, a metric or another word"),
    ),
    "report": (
        ("klinic report runs/arithmetic", "one HTML file"),
        ("klinic report runs/arithmetic runs/arithmetic-2", "two runs on the same axes"),
        ("klinic report runs/arithmetic --terminal", "gaps and heat map in the terminal"),
    ),
    "bundle": (
        ("klinic bundle runs/arithmetic", "writes runs/arithmetic/bundle.zip"),
        ("klinic diagnose bundle.zip", "the same verdict, wherever the bundle was sent"),
    ),
    "watch": (
        ("klinic watch runs/arithmetic", "live in the terminal; it may be started first"),
        ("klinic watch runs/arithmetic --web", "the report page, reloaded as the run trains"),
    ),
    "demo": (
        ("klinic demo", "a healthy run"),
        ("klinic demo --fault stale-sampler", "a run with a fault: cause, fix, proof, report"),
        ("klinic demo --list", "all faults"),
    ),
}
"""Examples by command; those of `""` are on the first page."""


class HelpCommand(TyperCommand):
    """A command with a page of this module as its help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write description, usage, arguments, options and examples."""
        page = _Page()
        page.add_text(self.help or "")
        page.add_usage(ctx)
        page.add_rows("Arguments", list(parameter_rows(self, ctx, "argument")))
        options = [*parameter_rows(self, ctx, "option"), ("--help", "Show this page.")]
        page.add_rows("Options", options)
        page.add_examples(EXAMPLES.get(self.name or "", ()))
        formatter.write(page.render())


class HelpGroup(TyperGroup):
    """The `klinic` command with a page of this module as its help."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the options of the group; wrap the message of an error."""
        with _wrap_usage_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; wrap the message of a usage error."""
        with _wrap_usage_errors():
            return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by group, the options and the first examples."""
        page = _Page()
        page.add_text(self.help or "")
        page.add_usage(ctx)
        commands = {name: self.commands[name] for name in self.list_commands(ctx)}
        widest = max(map(len, commands))
        groups = dict.fromkeys(_group_of(command) for command in commands.values())
        for group in groups:
            rows = [(n, c.help or "") for n, c in commands.items() if _group_of(c) == group]
            page.add_rows(group, rows, width=widest)
        options = [("--version", "Print the version."), ("--help", "Show this page.")]
        page.add_rows("Options", options, width=widest)
        page.add_examples(EXAMPLES[""])
        page.add_text("klinic COMMAND --help describes a command; klinic explain WORD a word.")
        formatter.write(page.render())

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command; suggest one for a name that does not exist."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command: {args[0]!r}. {self._suggest(args[0].lower())}")
        return super().resolve_command(ctx, args)

    def _suggest(self, name: str) -> str:
        near = get_close_matches(name, self.commands, n=1)
        meant = OTHER_NAMES.get(name) or next(iter(near), None)
        return f"Did you mean {meant}?" if meant else "`klinic --help` lists the commands."


@contextmanager
def _wrap_usage_errors() -> Iterator[None]:
    """Wrap the message of a usage error between words; typer leaves that to the terminal."""
    try:
        yield
    except UsageError as error:
        if not sys.stderr.isatty():
            raise
        message = wrap_words(error.format_message(), taken=len("Error: "))
        raise UsageError(message, ctx=error.ctx) from None


def option_label(record: str) -> str:
    """Return the first column of an option in short: its type is one word.

    >>> option_label("RECIPE <path>"), option_label("--num <int range>"), option_label("--vary A,B")
    ('RECIPE', '--num INT', '--vary A,B')
    """
    name, _, kind = record.strip().partition(" <")
    return f"{name} {kind.strip('>').split()[0].upper()}" if kind and name[0] == "-" else name


def usage_piece(piece: str) -> str:
    """Return an argument of the usage line without repeated brackets and dots.

    >>> usage_piece("{RECIPE}"), usage_piece("[[KEY=VALUE ...]]..."), usage_piece("{RUN [RUN2]}...")
    ('RECIPE', '[KEY=VALUE ...]', 'RUN [RUN2]')
    """
    if piece.startswith(("{", "[[")):
        piece = piece.removesuffix("...")
        return piece[1:-1]
    return piece.removesuffix("...") if " ...]" in piece else piece


def parameter_rows(command: Any, ctx: Any, kind: str = "") -> Iterator[tuple[str, str]]:
    """Yield label and text of the arguments and options of a command, without --help."""
    for parameter in command.params:
        record = parameter.get_help_record(ctx)
        if record is None or record[0].startswith("--help"):
            continue
        if not kind or parameter.param_type_name == kind:
            text = " ".join(record[1].split())
            text = re.sub(r"\[default: \((.*?)\)", r"[default: \1", text)
            yield option_label(record[0]), text


def _group_of(command: Any) -> str:
    return str(getattr(command, "rich_help_panel", None) or "Commands")


class _Page:
    """A help page under construction."""

    def __init__(self) -> None:
        columns = shutil.get_terminal_size().columns
        self._width = max(MIN_WIDTH, min(columns, MAX_WIDTH) - 1)
        self._colours = has_colours()
        self._parts: list[list[str]] = []

    def add_text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(self._wrap(" ".join(text.split()), indent=0))

    def add_usage(self, ctx: Any) -> None:
        """Add the usage line."""
        pieces = [usage_piece(piece) for piece in ctx.command.collect_usage_pieces(ctx)]
        usage = " ".join([ctx.command_path, *pieces])
        lines = self._wrap(f"Usage: {usage}", indent=0, hang=7)
        self._parts.append([self._bold("Usage:") + lines[0][6:], *lines[1:]])

    def add_rows(self, title: str, rows: Sequence[tuple[str, str]], width: int = 0) -> None:
        """Add a section of labels with their texts."""
        if not rows:
            return
        short = [len(label) for label, _ in rows if len(label) <= MAX_LABEL]
        column = 2 + max([width, *short]) + GAP
        lines = [self._bold(f"{title}:")]
        for label, text in rows:
            wrapped = self._wrap(text, indent=column)
            head = f"  {self._cyan(label)}"
            if len(label) > column - 2 - GAP:
                lines += [head, *wrapped]
            else:
                first = wrapped[0].lstrip() if wrapped else ""
                pad = " " * (column - 2 - len(label)) if first else ""
                lines += [f"{head}{pad}{first}", *wrapped[1:]]
        self._parts.append(lines)

    def add_examples(self, examples: Sequence[tuple[str, str]]) -> None:
        """Add commands with comments: to the right where all fit, else above."""
        if not examples:
            return
        column = 2 + max(len(command) for command, _ in examples) + GAP
        fits = all(column + 2 + len(why) <= self._width for _, why in examples)
        lines = [self._bold("Examples:")]
        for command, why in examples:
            if fits:
                pad = " " * (column - 2 - len(command))
                lines.append(f"  {self._cyan(command)}{pad}{self._dim('# ' + why)}")
            else:
                lines += [self._dim(line) for line in self._wrap(f"# {why}", indent=2)]
                lines += [self._cyan(line) for line in self._wrap_command(command)]
        self._parts.append(lines)

    def render(self) -> str:
        """Return the page."""
        return "\n\n".join("\n".join(part) for part in self._parts if part) + "\n"

    def _wrap(self, text: str, *, indent: int, hang: int = 0) -> list[str]:
        return textwrap.wrap(
            text,
            self._width,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + hang),
            break_long_words=False,
            break_on_hyphens=False,
        )

    def _wrap_command(self, command: str) -> list[str]:
        """Return a command in lines that a shell reads as one."""
        *lines, last = textwrap.wrap(
            command,
            self._width - 2,
            initial_indent=" " * 2,
            subsequent_indent=" " * 6,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return [*(f"{line} \\" for line in lines), last]

    def _bold(self, text: str) -> str:
        return typer.style(text, bold=True, fg="green") if self._colours else text

    def _cyan(self, text: str) -> str:
        return typer.style(text, fg="cyan") if self._colours else text

    def _dim(self, text: str) -> str:
        return typer.style(text, dim=True) if self._colours else text


def has_colours() -> bool:
    """Whether standard output is a terminal with colours, and NO_COLOR is unset."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
