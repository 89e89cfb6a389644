"""No wrong function is called correct, and every right one is, in any form."""

from pathlib import Path

import pytest
from tests.verify import right_kl_functions, wrong_kl_functions

from klinic.errors import FunctionError
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


# test_batch_functions.py asserts more of these two, which are as slow
ASSERTED_ELSEWHERE = {"leave_one_out_that_turns", "leave_one_out_with_a_dead_zone"}
WRONG = [
    pytest.param(name, marks=pytest.mark.slow) if name in ASSERTED_ELSEWHERE else name
    for name in wrong_kl_functions.NAMES
]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_is_never_called_correct(name):
    result = judgement("wrong_kl_functions.py", name)
    assert result.verdict != "correct", result.advice


def test_a_function_that_fails_at_real_vocabularies_is_refused(tmp_path):
    (tmp_path / "guarded.py").write_text(
        "def kl(logits, logits_ref):\n"
        "    if logits.shape[-1] > 32_768:\n"
        "        raise ValueError('too large for the dense KL')\n"
        "    logp, logp_ref = logits.log_softmax(-1), logits_ref.log_softmax(-1)\n"
        "    return (logp.exp() * (logp - logp_ref)).sum(-1)\n"
    )
    with pytest.raises(FunctionError, match=r"50257\].*too large for the dense KL"):
        measure(load_user_function(f"{tmp_path / 'guarded.py'}:kl"))
