"""Equivalence is proved by two one-sided tests, and a tie is never a win."""

import numpy as np
import pytest

from klinic.lab.ablation.comparison import Question, setting_rows
from klinic.lab.ablation.equivalence import correct_jointly, decide, outside_margin_p_value
from klinic.lab.ablation.intervals import correct_by_holm, paired_difference, student_quantile
from klinic.lab.ablation.verdict import recommend_setting

RNG = np.random.default_rng(0)


def trials(outcomes, measure="accuracy"):
    """Return trials by setting: lists of values, one a seed."""
    return [
        {"setting": setting, "seed": seed, measure: value}
        for setting, values in outcomes.items()
        for seed, value in enumerate(values, 1)
    ]


def decisions(outcomes, question, measure="accuracy"):
    results = trials(outcomes, measure)
    table = setting_rows(results, list(outcomes), "base", question)
    return recommend_setting(table, "accuracy", question)


@pytest.mark.parametrize("seed", range(20))
def test_equivalent_is_a_90_percent_interval_within_the_margin(seed):
    values = np.random.default_rng(seed).normal(0.0, 0.01, 5).tolist()
    found = paired_difference(values, [0.0] * 5)
    half = student_quantile(4, 0.9) * found.standard_error
    inside = found.mean - half > -0.012 and found.mean + half < 0.012
    assert (outside_margin_p_value(found, 0.012) < 0.05) == inside


def test_unequal_settings_are_called_equivalent_in_5_percent_at_most():
    """The true difference is the margin itself: the hardest case."""
    draws = RNG.normal(1.0, 0.3, size=(4_000, 5)).tolist()
    alarms = [outside_margin_p_value(paired_difference(d, [0.0] * 5), 1.0) < 0.05 for d in draws]
    assert np.mean(alarms) < 0.06


def test_the_four_verdicts():
    base = [0.80, 0.82, 0.81, 0.83, 0.80]
    outcomes = {
        "base": base,
        "up": [v + d for v, d in zip(base, (0.10, 0.11, 0.10, 0.12, 0.09), strict=True)],
        "down": [v - d for v, d in zip(base, (0.10, 0.11, 0.10, 0.12, 0.09), strict=True)],
        "same": [v + d for v, d in zip(base, (0.001, -0.002, 0.001, 0.0, -0.001), strict=True)],
        "open": [v + d for v, d in zip(base, (0.08, -0.05, 0.06, -0.03, 0.02), strict=True)],
    }
    verdict = decisions(outcomes, Question(outcome="accuracy", margin=0.02))
    assert verdict.decisions == {
        "up": "better",
        "down": "worse",
        "same": "equivalent",
        "open": "undecided",
    }
    assert "Equivalent within 0.02: same. Undecided at this power: open." in verdict.says
    without = decisions(outcomes, Question(outcome="accuracy"))
    assert without.decisions["same"] == "undecided"  # not significant proves no equality


def test_a_significant_difference_within_the_margin_is_no_win():
    outcomes = {"base": [0.8, 0.7, 0.9, 0.85], "tie": [0.8021, 0.7019, 0.902, 0.852]}
    assert decisions(outcomes, Question(outcome="accuracy")).best == "tie"
    verdict = decisions(outcomes, Question(outcome="accuracy", margin=0.01))
    assert verdict.best is None
    assert verdict.decisions == {"tie": "equivalent"}


def test_a_lower_kl_is_better():
    outcomes = {"base": [0.30, 0.31, 0.32, 0.30], "near": [0.10, 0.12, 0.11, 0.10]}
    verdict = decisions(outcomes, Question(outcome="kl_token"), "kl_token")
    assert verdict.best == "near"
    assert "lower than that of base (4 seeds, corrected for 1 tests)" in verdict.says


def test_a_declared_outcome_is_the_only_test():
    results = [r | {"kl_token": 0.1 * r["seed"]} for r in trials({"base": [0.1, 0.2], "b": [1, 2]})]
    _, row = setting_rows(results, ["base", "b"], "base", Question(outcome="accuracy"))
    assert np.isnan(row.differences["kl_token"].p_value)
    assert row.differences["accuracy"].p_value > 0


def test_with_one_test_each_the_joint_correction_is_holms():
    for p_values in RNG.uniform(size=(50, 5)).tolist():
        together = [own for (own,) in correct_jointly([[p] for p in p_values])]
        assert together == pytest.approx(correct_by_holm(p_values))


@pytest.mark.parametrize("difference", [0.0, 1.0])
def test_false_verdicts_of_a_page_stay_below_5_percent(difference):
    """Five comparisons, all equal or all at the margin: any false verdict is an alarm."""
    draws = RNG.normal(difference, 0.5, size=(600, 5, 5)).tolist()
    alarms = 0
    for page in draws:
        found = [paired_difference(values, [0.0] * 5) for values in page]
        tests = correct_jointly([[d.p_value, outside_margin_p_value(d, 1.0)] for d in found])
        alarms += any((own[1] if difference else own[0]) < 0.05 for own in tests)
    assert alarms / len(draws) < 0.075  # a standard error is 0.009


def test_equal_values_off_a_grid_prove_nothing():
    found = paired_difference([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
    assert outside_margin_p_value(found, 0.1) == 1.0
    assert decide(found) == "undecided"
