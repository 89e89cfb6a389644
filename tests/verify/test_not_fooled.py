"""No wrong function is called correct, and every right one is, in any form."""

from pathlib import Path

import pytest
from tests.verify import right_kl_functions, wrong_kl_functions

from klinic.verify.advice import judge
from klinic.verify.function import measure
from klinic.verify.loading import load_user_function

FOLDER = Path(__file__).parent


def judgement(file, name):
    return judge(measure(load_user_function(f"{FOLDER / file}:{name}")))


# a function that mixes the batch is called once for each of 4,096 pairs
SLOW = {"leave_one_out"}
RIGHT = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name in right_kl_functions.NAMES
]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_function_is_called_correct(name):
    result = judgement("right_kl_functions.py", name)
    assert result.verdict == "correct", result.advice


@pytest.mark.parametrize("name", wrong_kl_functions.NAMES)
def test_a_wrong_function_is_never_called_correct(name):
    result = judgement("wrong_kl_functions.py", name)
    assert result.verdict != "correct", result.advice
