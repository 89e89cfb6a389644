"""What a function returned is a number for each completion, or is refused in a sentence."""

import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.rewards.parse_result import RewardFault, RewardValues, parse_result


@given(st.lists(st.none() | st.floats() | st.integers(-(2**53), 2**53) | st.booleans()))
def test_numbers_and_none_pass_as_they_are(values):
    returned = parse_result(values, len(values))
    assert [value is None for value in returned] == [value is None for value in values]
    for value, number in zip(values, returned, strict=True):
        np.testing.assert_equal(number, value)
        assert number is None or type(number) is float


@pytest.mark.parametrize(
    "value", [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(1), np.array([1.0]), Fraction(1)]
)
def test_every_kind_of_number_is_a_float(value):
    assert parse_result([value], 1) == [1.0]


def test_a_whole_number_beyond_all_floats_is_infinite():
    assert parse_result([10**400], 1) == [math.inf]


@pytest.mark.torch
def test_numbers_of_torch_are_floats_too():
    import torch

    weights = torch.ones(2, requires_grad=True)
    assert parse_result(list(weights), 2) == parse_result(weights, 2) == [1.0, 1.0]


@pytest.mark.parametrize("value", ["1.0", b"1", [1.0], np.ones(2), np.array([]), 1j, object(), {}])
def test_what_is_no_number_is_named_with_its_type_and_place(value):
    with pytest.raises(RewardFault, match=rf"(?s)returned .*\({type(value).__name__}\)") as caught:
        parse_result([0.5, value], 2)
    assert caught.value.index == 1


@pytest.mark.parametrize(
    "result", [[1.0, 2.0], (1.0, 2.0), np.array([1.0, 2.0]), (x for x in (1.0, 2.0))]
)
def test_any_ordered_collection_is_a_list(result):
    assert parse_result(result, 2) == [1.0, 2.0]


@pytest.mark.parametrize("result", [None, 1.0, "12", b"12", {0: 1.0, 1: 2.0}, {1.0, 2.0}])
def test_what_has_no_order_or_no_entries_is_refused(result):
    with pytest.raises(RewardFault, match=r"returned .*, not a list"):
        parse_result(result, 2)


@pytest.mark.parametrize("result", [[], [1.0], [1.0, 2.0, 3.0]])
def test_the_wrong_number_of_values_is_refused_with_both_numbers(result):
    with pytest.raises(RewardFault, match=f"returned {len(result)} values? for 2 completions"):
        parse_result(result, 2)


def test_long_values_are_shown_in_short():
    with pytest.raises(RewardFault) as caught:
        parse_result(["x" * 10_000], 1)
    assert len(str(caught.value)) < 250


def test_what_was_lost_on_the_way_is_kept():
    assert parse_result(RewardValues([1.0, None], failed=1), 2).lost == {"failed": 1}
    assert parse_result([1.0, None], 2).lost == {}


def test_a_fault_survives_pickling():
    before = RewardFault("raised KeyError: 'gold'", 3, "Mend it.")
    after = pickle.loads(pickle.dumps(before))  # noqa: S301 - our own bytes
    assert (after.what, after.index, after.advice) == (before.what, 3, "Mend it.")
    assert str(after) == (
        "the reward function raised KeyError: 'gold', first at completion 3. Mend it."
    )
