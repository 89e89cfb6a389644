"""YAML as people write it: numbers are numbers, keys stand once, and nothing can run or explode."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.errors import ConfigError
from klinic.recipe.yaml_text import MAX_DEPTH, MAX_VALUES, dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E3", 1e3),
        ("-2.5e+1", -25.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("8", 8),
        ("-8", -8),
        ("1_000", 1000),
        ("0", 0),
        ("true", True),
        ("off", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("007", "007"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'8'", "8"),
        ("e5", "e5"),
        (".", "."),
        ("1.2.3", "1.2.3"),
        ("train[:100]", "train[:100]"),
        ("a.py:f", "a.py:f"),
        ("[a, 1]", ["a", 1]),
    ],
)
def test_a_value_is_what_it_looks_like(text, value):
    found = parse_yaml(text, where="x")
    assert found == value
    assert type(found) is type(value)


def test_infinity_and_nan_are_read_to_be_refused_later():
    assert parse_yaml("-.inf", where="x") == -math.inf
    assert math.isnan(parse_yaml(".nan", where="x"))


def test_keys_are_text_whatever_they_look_like():
    assert parse_yaml("{1: a, null: b, on: c}", where="x") == {"1": "a", "null": "b", "on": "c"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2", "x, line 4: .*'c' is set twice"),
        ("a: &a [*a]", "x, line 1: .*anchors"),
        ("a: *a", "anchors"),
        ("a: !!python/name:os.system x", "tags"),
        ("? [a]\n: 1", "a key is a list or a section"),
        ("a: [", "x, line 1: "),
        ("a: \x01", "position 3"),
        ("a: " + "1" * 5000, "too many digits"),
        ("a: 1\n---\nb: 1", "line 2"),
    ],
)
def test_what_a_recipe_does_not_need_is_refused_with_its_line(text, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_yaml(text, where="x")


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_the_depth_is_bounded_before_the_stack_is(opening):
    with pytest.raises(ConfigError, match=f"nested more than {MAX_DEPTH} deep"):
        parse_yaml(opening * 100_000, where="x")


def test_the_deepest_value_is_read():
    nested = parse_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH, where="x")
    for _ in range(MAX_DEPTH - 1):
        (nested,) = nested
    assert nested == []


def test_the_number_of_values_is_bounded():
    assert len(parse_yaml("- 1\n" * (MAX_VALUES - 1), where="x")) == MAX_VALUES - 1
    with pytest.raises(ConfigError, match="more than 2,000 keys and values"):
        parse_yaml("- 1\n" * MAX_VALUES, where="x")


looks_like_something = st.from_regex(r"[-+.0-9eE_:xobn~]{1,8}", fullmatch=True)
printable = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp")))
finite = st.floats(allow_nan=False, allow_infinity=False)


@given(printable | looks_like_something | st.integers() | finite | st.booleans() | st.none())
def test_what_is_written_is_read_back(value):
    found = parse_yaml(dump_yaml({"key": value}), where="x")["key"]
    assert found == value
    assert type(found) is type(value)
