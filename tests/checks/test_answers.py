"""Checks that ask the live learner, by answers that it could give."""

from dataclasses import replace

import pytest

from checks.exact_records import judged, record
from klinic.checks import (
    Case,
    Verdict,
    dropout_in_scoring,
    kl_gradient_wrong,
    kl_not_applied,
    kl_sign_flipped,
    layout_changes_logp,
    loss_scaled_wrong,
    policy_gradient_wrong,
)

PASS, FAIL, WARN, NO_DATA = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.NO_DATA
KL = (kl_gradient_wrong, kl_not_applied, kl_sign_flipped)
SCALE = loss_scaled_wrong.CHECK.name


def answer(ratio, cosine, norm=1.0, expected=1.0, like="unbiased"):
    return {
        "kl_gradient": {
            "ratio": ratio,
            "cosine": cosine,
            "norm": norm,
            "expected_norm": expected,
            "score_norm": 1.0,
            "looks_like": like,
        }
    }


@pytest.mark.parametrize(
    ("given", "verdicts"),
    [
        (answer(1.0, 1.0), (PASS, PASS, PASS)),
        (answer(1.01, 0.9999), (PASS, PASS, PASS)),
        (answer(0.0, 0.0, norm=0.0), (PASS, FAIL, PASS)),
        (answer(2.0, 1.0, norm=2.0), (PASS, FAIL, PASS)),
        (answer(-1.0, -1.0), (PASS, PASS, FAIL)),
        (answer(-0.3, -0.99, norm=0.3), (PASS, PASS, FAIL)),
        (answer(0.4, 0.5), (FAIL, PASS, PASS)),
        (answer(0.5, 1.0, norm=0.5), (FAIL, PASS, PASS)),
        (answer(2.0, 0.9, norm=2.2), (FAIL, PASS, PASS)),
        (answer(None, None, norm=0.0, expected=0.0), (NO_DATA, NO_DATA, NO_DATA)),
        (answer(None, None, norm=0.5, expected=0.0), (FAIL, NO_DATA, NO_DATA)),
    ],
)
def test_one_answer_names_one_fault_of_the_kl_term(given, verdicts):
    assert tuple(judged(check, record(), answers=given) for check in KL) == verdicts


@pytest.mark.parametrize(
    ("kl_coef", "estimator", "expected"),
    [(0.0, None, PASS), (0.01, None, NO_DATA), (None, None, NO_DATA), (0.0, "k3", NO_DATA)],
)
def test_a_term_that_nobody_asked_for_has_no_fault(kl_coef, estimator, expected):
    given = replace(record(), facts={"kl_coef": kl_coef})
    for check in KL:
        assert judged(check, given, run={"estimator": estimator}) is expected


@pytest.mark.parametrize(("version", "expected"), [(0, NO_DATA), (1, PASS)])
def test_a_policy_that_updates_have_not_moved_was_not_pushed_away(version, expected):
    agree = answer(None, None, norm=0.0, expected=0.0)
    given = replace(record(), facts={"learner_version": version})
    assert judged(kl_sign_flipped, given, answers=agree) is expected


def test_a_coefficient_that_was_above_0_before_may_have_done_harm():
    before, now = (replace(record(), facts={"kl_coef": coef}) for coef in (0.1, 0.0))
    case = Case(record=now, run={"estimator": None}, earlier=(before,))
    assert all(check.CHECK(case).verdict is NO_DATA for check in KL)


def test_an_estimator_without_a_gradient_is_wrong_as_the_recipe_has_it():
    given = answer(1.0, 1.0)
    assert judged(kl_gradient_wrong, record(), answers=given, run={"estimator": "k1"}) is FAIL
    assert judged(kl_gradient_wrong, record(), answers=given, run={"estimator": "k3"}) is WARN
    assert judged(kl_gradient_wrong, record(), answers=given, run={"estimator": "k2"}) is PASS


@pytest.mark.parametrize(
    ("ratio", "cosine", "like", "own", "stock"),
    [
        (1.0, 1.0, "unbiased", PASS, PASS),
        (0.74, 0.996, "unbiased", PASS, FAIL),  # sums of tokens divided by rows
        (6.0, 0.8, "k3", PASS, FAIL),  # another estimator, far from the reference
        (2.6, 0.88, "k1", FAIL, FAIL),
    ],
)
def test_an_own_loss_has_its_own_estimator_and_average(ratio, cosine, like, own, stock):
    for overridden, expected in ((True, own), (False, stock)):
        run = {"estimator": "unbiased", "loss": {"name": "grpo", "overridden": overridden}}
        given = answer(ratio, cosine, like=like)
        assert judged(kl_gradient_wrong, record(), answers=given, run=run) is expected


def test_scoring_twice_must_agree():
    assert judged(dropout_in_scoring, record(), answers={"rescore": {"largest": 0.0}}) is PASS
    assert judged(dropout_in_scoring, record(), answers={"rescore": {"largest": 0.02}}) is FAIL
    assert judged(dropout_in_scoring, record()) is NO_DATA


@pytest.mark.parametrize(
    ("largest", "dtype", "expected"),
    [(1e-5, "fp32", PASS), (0.1, "fp32", FAIL), (0.1, "bf16", PASS), (3.0, "bf16", FAIL)],
)
def test_rows_alone_must_agree_to_the_precision_of_the_run(largest, dtype, expected):
    given = {"rescore_alone": {"largest": largest}}
    run = {"policy": {"dtype": dtype}}
    assert judged(layout_changes_logp, record(), answers=given, run=run) is expected


@pytest.mark.parametrize(
    ("ratio", "cosine", "expected"),
    [
        (1.0, 1.0, PASS),
        (0.5, 1.0, FAIL),
        (2.0, 1.0, FAIL),
        (1.0, 0.9, FAIL),
        (None, None, NO_DATA),
    ],
)
def test_cutting_a_step_must_not_change_its_gradient(ratio, cosine, expected):
    given = {"micro_batches": {"ratio": ratio, "cosine": cosine}}
    assert judged(loss_scaled_wrong, record(), answers=given) is expected


def test_no_wrong_scale_leaves_nothing_of_a_kl_term_and_one_may_leave_twice_of_it():
    nothing, twice = answer(0.0, 0.0, norm=0.0), answer(2.0, 1.0, norm=2.0)
    judge = kl_not_applied.CHECK.judge
    found = [judge(Case(record=record(), probe_results=said)) for said in (nothing, twice)]
    assert [f.verdict for f in found] == [FAIL, FAIL]
    assert [SCALE in f.excludes for f in found] == [True, False]


@pytest.mark.parametrize(
    ("cosine", "norm", "expected", "verdict"),
    [
        (1.0, 1.0, 1.0, PASS),
        (0.7, 30.0, 1.0, PASS),  # another aggregation
        (0.0, 0.0, 1.0, FAIL),
        (-1.0, 1.0, 1.0, FAIL),
        (0.05, 1.0, 1.0, FAIL),
        (None, 0.0, 0.0, NO_DATA),
        (float("nan"), float("nan"), 1.0, NO_DATA),
    ],
)
def test_a_policy_term_follows_its_advantages(cosine, norm, expected, verdict):
    given = {"ratio": None, "cosine": cosine, "norm": norm, "expected_norm": expected}
    found = judged(policy_gradient_wrong, record(), answers={"policy_gradient": given})
    assert found is verdict


def test_a_gradient_of_0_as_a_whole_is_no_fault_of_the_policy_term_alone():
    given = {"policy_gradient": {"cosine": 0.0, "norm": 0.0, "expected_norm": 1.0}}
    still = replace(record(), facts={"grad_norm": 0.0})
    assert judged(policy_gradient_wrong, still, answers=given) is PASS
    assert judged(policy_gradient_wrong, record(), answers=given) is FAIL
