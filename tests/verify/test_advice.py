"""Every advice that klinic prints is itself called correct when it is followed."""

import re
from pathlib import Path

import pytest
import torch

from klinic.verify.advice import judge
from klinic.verify.function import measure
from klinic.verify.loading import UserFunction, load_user_function
from klinic.verify.recommendation import USE_EXACT, USE_UNBIASED

FOLDER = Path(__file__).parent
LOG_PROB_ROLES = {"logp": "logp", "logp_ref": "logp_ref"}
WITH_SAMPLER = LOG_PROB_ROLES | {"logp_old": "logp_old"}


def load(name, file="right_kl_functions.py"):
    return load_user_function(f"{FOLDER / file}:{name}")


def advice(function):
    return judge(measure(function)).advice


def verdict(call, roles):
    result = judge(measure(UserFunction(name="followed", call=call, roles=roles)))
    return result.verdict, result.advice


def code_in(text):
    return re.findall(r"`([^`]+)`", text)


def test_the_estimator_unbiased_as_advised():
    assert USE_UNBIASED in advice(load("plain_k1", "wrong_kl_functions.py"))
    _, term, ratio = code_in(USE_UNBIASED)

    def followed(logp, logp_ref, logp_old):
        names = {"torch": torch, "logp": logp, "logp_ref": logp_ref, "logp_old": logp_old}
        names["ratio"] = eval(ratio, names)  # noqa: S307 - the advice of klinic itself
        return eval(term, names)  # noqa: S307

    result, text = verdict(followed, WITH_SAMPLER)
    assert result == "correct", text
    assert "held at 2" in text


def test_the_estimator_exact_as_advised():
    assert USE_EXACT in advice(load("floor_of_probabilities", "wrong_kl_functions.py"))
    _, term, p, q = code_in(USE_EXACT)

    def followed(logits, logits_ref):
        names = {"logits": logits, "logits_ref": logits_ref}
        p_row, q_row = eval(p, names), eval(q, names)  # noqa: S307
        return eval(term, {"p": p_row, "q": q_row})  # noqa: S307

    result, text = verdict(followed, {"logits": "logits", "logits_ref": "logits_ref"})
    assert result == "correct", text


# Each needs another ratio: of the token, of the completion per token, of the completion.
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("half_mse", "the token ratio"),
        ("straight_through", "the token ratio"),
        ("to_go", "sequence importance sampling"),
        ("squared_total", "sequence importance sampling"),
        ("reinforce", "sequence importance sampling"),
        ("total_of_squares", "sequence importance sampling"),
    ],
)
def test_the_ratio_for_completions_of_an_older_policy(name, form):
    function = load(name)
    (ratio,) = code_in(advice(function))

    def followed(logp, logp_ref, logp_old):
        names = {"torch": torch, "logp": logp, "logp_old": logp_old}
        return function.call(logp, logp_ref) * eval(ratio, names)  # noqa: S307

    result, text = verdict(followed, WITH_SAMPLER)
    assert result == "correct", text
    assert form in text


def test_the_ratio_of_a_function_that_takes_a_mask():
    function = load("total_with_mask")
    (ratio,) = code_in(advice(function))

    def followed(logp, logp_ref, logp_old, loss_mask):
        names = {"torch": torch, "logp": logp, "logp_old": logp_old, "loss_mask": loss_mask}
        return function.call(logp, logp_ref, loss_mask) * eval(ratio, names)  # noqa: S307

    assert verdict(followed, WITH_SAMPLER | {"loss_mask": "mask"})[0] == "correct"


@pytest.mark.parametrize("factor", [0.04, 2.0, 1 / 7])
def test_the_divisor(factor):
    def scaled(logp, logp_ref):
        return factor * (logp - logp_ref) ** 2 / 2

    text = verdict(scaled, LOG_PROB_ROLES)[1]
    divisor = float(re.search(r"Divide it by ([0-9.e-]+);", text)[1])
    assert verdict(lambda logp, logp_ref: scaled(logp, logp_ref) / divisor, LOG_PROB_ROLES)[0] == (
        "correct"
    )


def test_a_cost_in_the_reward():
    function = load("plain_k1", "wrong_kl_functions.py")
    assert "used as a cost in the reward it would be right" in advice(function)

    def followed(logp, logp_ref):
        return function.call(logp, logp_ref).detach().sum(-1, keepdim=True) * logp

    assert verdict(followed, LOG_PROB_ROLES)[0] == "correct"


def test_the_sum_instead_of_a_mean():
    def averaged(logp, logp_ref):
        return ((logp - logp_ref) ** 2 / 2).mean(-1)

    assert "Return the KL of each token, or their sum" in verdict(averaged, LOG_PROB_ROLES)[1]
    for followed in ("half_mse", "total_of_squares"):
        assert judge(measure(load(followed))).verdict == "correct"


def test_the_sum_over_the_vocabulary():
    function = load("mean_over_the_vocabulary", "wrong_kl_functions.py")
    assert "sum over it, not average" in advice(function)
    assert judge(measure(load("full"))).verdict == "correct"


def test_float32_instead_of_a_half_dtype():
    text = advice(load("k2_in_bfloat16_and_back", "wrong_kl_functions.py"))
    assert "use float32" in text
    assert judge(measure(load("cast_and_back"))).verdict == "correct"


def test_the_rest_from_log_probs():
    def subtracted(logits, logits_ref):
        p, q = logits.softmax(-1), logits_ref.softmax(-1)
        top = p.topk(2, -1).indices
        p, q = p.gather(-1, top), q.gather(-1, top)
        rest_p, rest_q = 1 - p.sum(-1), 1 - q.sum(-1)
        return (p * (p / q).log()).sum(-1) + rest_p * (rest_p / rest_q).log()

    text = verdict(subtracted, {"logits": "logits", "logits_ref": "logits_ref"})[1]
    assert "compute the rest from log-probs" in text
    assert "NaN" not in advice(load("top_1_and_rest"))


def test_the_distance_d_is_defined_where_it_is_first_named():
    def ratio_minus_log(logp, logp_ref):  # overflows, but has no dead zone
        return torch.exp(logp - logp_ref) - 1 - (logp - logp_ref)

    _, text = verdict(ratio_minus_log, LOG_PROB_ROLES)
    assert "overflows for d < -88.72 (d = logp_ref - logp)." in text
    assert text.count("d = logp_ref - logp") == 1
    assert text.index("d <") < text.index("|d|")
