"""The reference of `klinic.Recorder` lists the arguments that it has, and no others."""

import inspect
import re
from pathlib import Path

import pytest

from klinic import Recorder

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "recorder.md").read_text()
SECTIONS = dict(re.findall(r"^## (The \w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def rows_of(section):
    """Return the cells of a table by argument; a row may hold several arguments."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {name: row[1:] for row in cells for name in re.findall(r"`(\w+)`", row[0])}


@pytest.mark.parametrize(
    ("section", "method"),
    [("The samples", Recorder.record_samples), ("The step", Recorder.record_step)],
)
def test_the_page_has_every_argument_with_its_meaning_and_default(section, method):
    parameters = dict(inspect.signature(method).parameters)
    del parameters["self"]
    rows = rows_of(section)
    assert rows.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert all(rows[name]), name
        is_required = parameter.default is inspect.Parameter.empty
        assert (rows[name][-1] == "required") == is_required, name


def test_the_codes_of_the_page_are_those_of_the_record():
    from klinic.evidence.record import EmittedBy

    meaning = rows_of("The step")["emitted_by"][1]
    assert [int(code) for code in re.findall(r"\b\d\b", meaning)] == [
        code.value for code in EmittedBy
    ]
