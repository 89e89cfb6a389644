"""The badges of README state the facts of the project."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def load_script():
    spec = importlib.util.spec_from_file_location("draw_badges", DOCS / "draw_badges.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_badges_are_those_of_the_project():
    for name, svg in load_script().badges().items():
        assert (DOCS / "assets" / name).read_text() == svg, "run python docs/draw_badges.py"


def test_the_facts_come_from_the_project():
    svgs = "".join(load_script().badges().values())
    assert ">3.11+<" in svgs
    assert ">Apache-2.0<" in svgs
