"""Functions that mix a batch are scanned in pairs of completions; values are not guessed."""

from pathlib import Path

import pytest

from klinic.verify.advice import judge
from klinic.verify.function import measure
from klinic.verify.known_values import identify_value
from klinic.verify.loading import load_user_function

WRONG = Path(__file__).with_name("wrong_kl_functions.py")


def examine(name):
    measured = measure(load_user_function(f"{WRONG}:{name}"))
    return measured, judge(measured)


def test_a_sign_that_turns_beyond_every_world_is_wrong():
    measured, judgement = examine("leave_one_out_that_turns")
    assert measured.departure.reverses_at.above == pytest.approx(12.5)
    assert judgement.verdict == "wrong"
    assert "pushes the policy away" in judgement.advice


def test_a_dead_zone_is_found_and_a_constant_is_no_multiple_of_the_kl():
    measured, judgement = examine("leave_one_out_with_a_dead_zone")
    assert measured.departure.departs_at.above == pytest.approx(12.5)
    assert judgement.verdict == "conditional"
    assert measured.value is None
    assert judgement.value == "no KL: log k1 or k3 as well"


def test_one_world_names_no_value():
    with pytest.raises(ValueError, match="two worlds"):
        identify_value([1.0], [{"kl": 2.0}], 1e-9)


def test_a_gradient_that_is_nan_in_float32_is_not_correct():
    measured, judgement = examine("rest_as_one_minus_a_sum")
    assert not measured.vocabulary.is_finite_if_certain
    assert judgement.verdict == "conditional"
    assert "NaN" in judgement.advice


def test_a_value_that_is_nan_at_one_size_is_not_correct():
    _, judgement = examine("value_not_finite_in_float32")
    assert judgement.verdict == "conditional"
    assert "NaN or infinite at vocabularies" in judgement.advice
