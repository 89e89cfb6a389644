"""Intervals cover as often as they promise, p-values are Student's, and Holm's correction holds."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.lab.ablation.intervals import (
    correct_by_holm,
    grid_step,
    mean_interval,
    paired_difference,
    student_p_value,
    student_quantile,
)

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("degrees", "quantile"),  # 97.5% quantiles of printed tables
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042)],
)
def test_students_quantile_is_that_of_the_tables(degrees, quantile):
    assert student_quantile(degrees) == pytest.approx(quantile, abs=5e-4)


@pytest.mark.parametrize("degrees", range(1, 9))
def test_the_p_value_is_the_integral_of_students_density(degrees):
    scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
    x = np.linspace(0, 2.5, 20_001)
    inside = 2 * np.trapezoid(scale * (1 + x * x / degrees) ** (-(degrees + 1) / 2), x)
    assert student_p_value(2.5, degrees) == pytest.approx(1 - inside, abs=1e-8)
    assert student_p_value(-2.5, degrees) == student_p_value(2.5, degrees)


def test_without_correction_a_p_value_below_5_percent_is_an_interval_without_0():
    for seed in range(50):
        values = np.random.default_rng(seed).normal(1.0, 1.0, 4).tolist()
        found = paired_difference(values, [0.0] * 4)
        assert (found.p_value < 0.05) == (found.low > 0 or found.high < 0)


def test_equal_differences_have_no_spread_to_test_against():
    """Accuracies are multiples of 1/200: two equal differences are a coincidence, not a proof."""
    found = paired_difference([0.835, 0.805], [0.83, 0.80])
    assert found.p_value == 1.0
    assert not found.is_significant
    assert math.isnan(found.low)  # an interval of width 0 would claim certainty


def test_equal_fractions_have_the_interval_of_half_a_step():
    """200 of 200 right on five seeds: the mean may be as low as the rule of three, 3 / 1000."""
    found = mean_interval([1.0] * 5, grid=1 / 200)
    assert 1 - 2 * 3 / 1000 < found.low < 1 - 3 / 1000
    wide = [0.8, 0.9, 1.0]
    assert mean_interval(wide, grid=1 / 200) == mean_interval(wide)


@given(st.lists(st.integers(0, 200), min_size=3, max_size=9, unique=True))
def test_fractions_of_questions_lie_on_a_grid(counts):
    """A coarser grid may hold them as well, never a finer one only."""
    step = grid_step([count / 200 for count in counts])
    assert step >= 1 / 200
    assert all(abs(count / 200 / step - round(count / 200 / step)) < 1e-6 for count in counts)


def test_two_values_and_continuous_values_show_no_grid():
    assert grid_step([1.0, 1.0, 0.5]) == 0.0
    assert grid_step(np.random.default_rng(0).normal(size=9).tolist()) == 0.0


def test_holms_correction_by_hand():
    assert correct_by_holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


@given(P_VALUES)
def test_holms_correction_is_the_closed_test_of_bonferroni(p_values):
    """A hypothesis is rejected exactly where every intersection that contains it is."""
    everyone = range(len(p_values))
    for one, corrected in zip(everyone, correct_by_holm(p_values), strict=True):
        others = [i for i in everyone if i != one]
        intersections = itertools.chain.from_iterable(
            itertools.combinations(others, num) for num in range(len(p_values))
        )
        closed = max(
            len(members) * min(p_values[i] for i in members)
            for members in ((one, *rest) for rest in intersections)
        )
        assert corrected == pytest.approx(min(1.0, closed))


def test_the_correction_keeps_false_alarms_of_a_whole_page_below_5_percent():
    """Pages of 12 tests between equals, three seeds: uncorrected, almost half have an alarm."""
    draws = np.random.default_rng(0).normal(size=(2_000, 12, 3))
    spreads = draws.std(axis=2, ddof=1) / math.sqrt(3)
    statistics = np.abs(draws.mean(axis=2) / spreads)
    p_values = np.vectorize(lambda t: student_p_value(t, 2))(statistics)
    corrected = np.array([correct_by_holm(page) for page in p_values.tolist()])
    assert (p_values < 0.05).any(axis=1).mean() > 0.4
    assert (corrected < 0.05).any(axis=1).mean() < 0.06
