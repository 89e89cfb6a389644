"""What a function returned is a number for each completion, or is refused in a sentence."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.errors import RewardError
from klinic.rewards.returned import as_list, as_numbers


@given(st.lists(st.none() | st.floats() | st.integers(-(2**53), 2**53) | st.booleans()))
def test_numbers_pass_and_everything_else_is_counted(values):
    returned = as_numbers("mine", values)
    assert len(returned.values) == len(values)
    for value, number in zip(values, returned.values, strict=True):
        if value is None or not np.isfinite(value):
            assert np.isnan(number)
        else:
            assert number == value
    given_ones = [value for value in values if value is not None]
    assert returned.num_nonfinite == sum(not np.isfinite(value) for value in given_ones)


@pytest.mark.parametrize(
    "value", [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(1), np.array([1.0]), Fraction(1)]
)
def test_every_kind_of_number_is_a_float(value):
    values = as_numbers("mine", [value]).values
    assert values.dtype == np.float64
    assert values.tolist() == [1.0]


@pytest.mark.torch
def test_numbers_of_torch_are_floats_too():
    import torch

    weights = torch.ones(2, requires_grad=True)
    assert as_numbers("mine", list(weights)).values.tolist() == [1.0, 1.0]
    assert as_numbers("mine", as_list("mine", weights, 2)).values.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "value", ["1.0", b"1", [1.0], np.ones(2), np.array([]), 1j, 10**400, object(), {}]
)
def test_what_is_no_number_is_named_with_its_type(value):
    with pytest.raises(RewardError, match=rf"(?s)mine returned .*\({type(value).__name__}\)"):
        as_numbers("mine", [0.5, value])


@pytest.mark.parametrize(
    "result", [[1.0, 2.0], (1.0, 2.0), np.array([1.0, 2.0]), (x for x in (1.0, 2.0))]
)
def test_any_ordered_collection_is_a_list(result):
    assert as_list("mine", result, 2) == [1.0, 2.0]


@pytest.mark.parametrize("result", [None, 1.0, "12", b"12", {0: 1.0, 1: 2.0}, {1.0, 2.0}])
def test_what_has_no_order_or_no_entries_is_refused(result):
    with pytest.raises(RewardError, match=r"mine returned .*, not a list"):
        as_list("mine", result, 2)


@pytest.mark.parametrize("result", [[], [1.0], [1.0, 2.0, 3.0]])
def test_the_wrong_number_of_values_is_refused_with_both_numbers(result):
    with pytest.raises(RewardError, match=f"mine returned {len(result)} values for 2 completions"):
        as_list("mine", result, 2)


def test_long_values_are_shown_in_short():
    with pytest.raises(RewardError) as caught:
        as_numbers("mine", ["x" * 10_000])
    assert len(str(caught.value)) < 200
