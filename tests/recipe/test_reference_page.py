"""The page about the recipe names every key with its default, and every familiar name."""

import re
from pathlib import Path

import pytest

from klinic.recipe import yaml_text
from klinic.recipe.aliases import ALIASES, REFUSED
from klinic.recipe.keys import all_fields

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "recipe.md").read_text()


def rows():
    """Return the cells of every row of a table, by dotted key."""
    found = {}
    for heading, body in re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", PAGE, re.M):
        section = "" if heading == "Top level" else heading.strip("`") + "."
        for line in re.findall(r"^\| (`.*) \|$", body, re.M):
            cells = [cell.strip() for cell in line.split(" | ")]
            found[section + cells[0].strip("`")] = cells
    return found


ROWS = rows()


@pytest.mark.parametrize("key", all_fields())
def test_every_key_stands_there_with_its_default(key):
    field = all_fields()[key]
    default = ROWS[key][1]
    if field.is_required():
        assert default == "required"
    else:
        found = yaml_text.parse_yaml(default.strip("`"), where="page")
        if isinstance(field.default, tuple):
            assert isinstance(found, list)
            found = tuple(found)
        assert found == field.default
        assert type(found) is type(field.default)


def test_no_key_stands_there_that_does_not_exist():
    knobs = {key for key in ROWS if not key.startswith(("Names", "Refused"))}
    assert knobs == set(all_fields())


@pytest.mark.parametrize("name", ALIASES)
def test_every_familiar_name_stands_beside_its_key(name):
    target = ALIASES[name]
    if isinstance(target, str):
        assert f"`{name}`" in ROWS[target][3]
    else:
        assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", REFUSED)
def test_every_name_without_counterpart_stands_there(name):
    assert f"`{name}`" in PAGE.partition("## Names without a counterpart")[2]
