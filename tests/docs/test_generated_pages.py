"""Tables of the docs that repeat the source are what the source says today."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "generate.py"


def script():
    spec = importlib.util.spec_from_file_location("generate", SCRIPT)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


GENERATE = script()


@pytest.mark.parametrize("page", list(GENERATE.pages()), ids=lambda page: page.name)
def test_the_tables_are_those_of_the_source(page):
    text = page.read_text()
    assert GENERATE.written(text) == text, "run python docs/generate.py"


def test_every_table_has_a_page():
    text = "".join(page.read_text() for page in GENERATE.pages())
    assert [name for name in GENERATE.TABLES if f"<!-- table: {name} -->" not in text] == []


def test_a_stale_table_is_seen():
    stale = "<!-- table: estimators -->\n| `k4` |\n<!-- end -->\n"
    assert "`unbiased`" in GENERATE.written(stale)
    assert "k4" not in GENERATE.written(stale)
