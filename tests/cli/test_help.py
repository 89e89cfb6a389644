"""Help pages: grouped, whole at every width, with examples that parse."""

import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from klinic.cli.app import app
from klinic.cli.help_page import EXAMPLES, OTHER_NAMES

ROOT = typer.main.get_command(app)
COMMANDS = ROOT.commands
GROUPS = {
    "Train": ["train", "eval", "ablate", "export"],
    "Check": ["check", "verify", "diagnose", "explain"],
    "Look": ["convert", "report", "bundle", "watch", "demo"],
}


def page(*words, columns=80):
    """Return the help of `klinic` or of a command, as a terminal of that width has it."""
    command, names = ROOT, ["klinic", *words]
    if words:
        command = COMMANDS[words[0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        return command.get_help(command.context_class(command, info_name=" ".join(names)))


def refusal(*words):
    """Return the message for words that are no command."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "80"})
    assert result.exit_code == 2
    return joined(result.output)


def joined(text):
    return " ".join(text.split())


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_commands_are_grouped_with_their_whole_descriptions(columns):
    text = page(columns=columns)
    sections = {part.partition(":")[0]: part for part in text.split("\n\n")}
    for group, names in GROUPS.items():
        labels = [line.split()[0] for line in sections[group].splitlines() if line[2:3].strip()]
        assert labels == [f"{group}:", *names]
        for name in names:
            assert joined(COMMANDS[name].help) in joined(sections[group])
    assert "..." not in sections["Train"] + sections["Check"] + sections["Look"]


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_no_line_is_wider_than_the_terminal(name, columns):
    text = page(*filter(None, [name]), columns=columns)
    written = {command for examples in EXAMPLES.values() for command, _ in examples}
    wide = [line for line in text.splitlines() if len(line) >= columns]
    # a command is one line, to be copied
    assert [line for line in wide if line.strip() not in written and "<" not in line] == []
    assert "\x1b" not in text


def test_a_description_wraps_between_words_only():
    narrow, wide = (page("train", columns=columns) for columns in (60, 100))
    assert set(narrow.split()) == set(wide.split())


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_examples(name):
    text = page(name, columns=100)
    assert "Examples:" in text
    for command, why in EXAMPLES[name]:
        assert command in text
        assert why in text


@pytest.mark.parametrize("line", [line for examples in EXAMPLES.values() for line, _ in examples])
def test_an_example_is_a_command_that_parses(line):
    program, name, *rest = shlex.split(line)
    assert program == "klinic"
    context = COMMANDS[name].make_context(name, rest)
    unknown = [word for word in context.args if word.startswith("-")]
    assert unknown == []
    for word in rest:
        assert not word.startswith("recipes/") or Path(word).is_file(), word
    if name == "demo" and "--fault" in rest:
        from klinic.lab.demo.shown import DEMO_FAULTS

        assert rest[1] in DEMO_FAULTS


@pytest.mark.parametrize(("typed", "meant"), [*OTHER_NAMES.items(), ("trian", "train")])
def test_another_name_of_a_command_is_answered_with_its_name_here(typed, meant):
    assert refusal(typed).endswith(f"No such command: {typed!r}. Did you mean {meant}?")
    assert meant in COMMANDS or meant in page()


def test_a_name_that_is_like_none_gets_no_guess():
    assert "`klinic --help` lists the commands." in refusal("xyzzy")
