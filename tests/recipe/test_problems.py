"""Values in messages: short, on one line, and safe for a terminal."""

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.recipe.validation_messages import MAX_SHOWN_LENGTH, format_key, format_value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1, "1"),
        (1e-6, "1e-06"),
        ("a", "'a'"),
        ([1], "a list"),
        ((1,), "a list"),
        ({}, "a section"),
        (datetime.date(2024, 1, 1), "date"),
        ("\x1b[31m", "'\\x1b[31m'"),
    ],
)
def test_a_value_as_it_is_shown(value, text):
    assert format_value(value) == text


@given(st.text() | st.integers() | st.floats() | st.binary())
def test_whatever_is_shown_is_one_short_printable_line(value):
    assert format_value(value).isprintable()
    assert len(format_value(value)) <= MAX_SHOWN_LENGTH + 2


@given(st.text(st.characters()))
def test_a_key_is_shown_printable(key):
    assert format_key(key).isprintable()
    assert len(format_key(key)) <= MAX_SHOWN_LENGTH + 2


def test_a_number_too_long_to_print_is_shown_by_its_length():
    assert format_value(10**5000) == "a number of more than 60 digits"


def test_a_plain_key_is_shown_bare():
    assert format_key("kl.coef") == "kl.coef"
    assert format_key("kl coef") == "'kl coef'"
    assert format_key("") == "''"
