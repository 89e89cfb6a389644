"""A mean over each completion's own length adds the gradient of E[1/length] to a constant pull."""

from pathlib import Path

import pytest
from tests.verify import right_kl_functions

from klinic.verify.advice import judge
from klinic.verify.function import measure
from klinic.verify.loading import load_user_function

FOLDER = Path(__file__).parent


def examine(file, name):
    measured = measure(load_user_function(f"{FOLDER / file}:{name}"))
    return measured, judge(measured)


@pytest.mark.parametrize("name", right_kl_functions.NAMES_IN_SUMS)
def test_a_constant_pull_is_right_in_sums_only(name):
    measured, judgement = examine("right_kl_functions.py", name)
    assert measured.own_length.length_push == pytest.approx(1.0)
    assert judgement.verdict == "conditional"
    assert "also pushes towards longer completions" in judgement.advice


def test_k1_pushes_towards_longer_completions_under_such_a_mean():
    measured, judgement = examine("kl_functions.py", "k1")
    assert measured.own_length.length_push == pytest.approx(1.0)
    assert judgement.verdict == "wrong"
    assert "own length it pushes towards longer completions" in judgement.advice


def test_a_pull_of_k1_alone_has_no_such_push():
    measured, judgement = examine("kl_functions.py", "k2")
    assert measured.own_length.error < 1e-12
    assert "own length" not in judgement.advice


def test_a_mask_with_a_hole_is_no_length():
    measured, judgement = examine("wrong_kl_functions.py", "mask_read_as_a_length")
    assert measured.failed_checks == ("mask_holes",)
    assert judgement.verdict == "conditional"
    assert "reads the mask as a length" in judgement.advice
