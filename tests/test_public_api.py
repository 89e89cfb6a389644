"""`dir(klinic)` is the public API, and its type stub names the same."""

import ast
from pathlib import Path

import klinic

STUB = Path(klinic.__file__).with_suffix(".pyi")


def test_dir_shows_the_public_names():
    assert dir(klinic) == sorted(klinic.__all__)
    assert set(klinic.LAZY) == set(klinic.__all__) - {"__version__"}


def test_the_stub_takes_each_name_from_where_it_is_loaded():
    imports = {
        alias.name: node.module
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imports == klinic.LAZY
