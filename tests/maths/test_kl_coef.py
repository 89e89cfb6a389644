"""Rules that move the coefficient: by hand, and in closed loop with a policy they steer."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.errors import ConfigError
from klinic.maths.kl_coef import RULES, KLCoefRule, KLCoefState, linear_warmup, update
from maths.plant import STEPS, closed_loop, closed_loops

TARGET = 0.05
ANY_RULE = st.sampled_from(sorted(RULES))
ANY_KL = st.floats(-10, 1e4, allow_nan=False)


def last_half(ratio):
    half = ratio[STEPS // 2 :]
    return half.mean(), half.std()


@pytest.mark.parametrize("seed", range(5))
def test_log_pi_settles_on_its_target(seed):
    mean, spread = last_half(closed_loop(KLCoefRule(rule="log_pi"), seed=seed)[0])
    assert 0.95 <= mean <= 1.05
    assert spread <= 0.10


RATES = [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1]


@pytest.mark.parametrize("steps", [6000, pytest.param(12000, marks=pytest.mark.slow)])
def test_log_pi_settles_on_slow_and_fast_policies(steps):
    ratios, _ = closed_loops(
        KLCoefRule(rule="log_pi"), rates=RATES, seeds=[0, 1, 2, 3], steps=steps
    )
    half = ratios[steps // 2 :]
    means = half.mean(axis=0)
    assert means.shape == (6, 4)
    assert means.min() >= 0.95, means
    assert means.max() <= 1.05, means
    assert half.min() >= 0.8, half.min(axis=0)
    assert half.max() <= 1.25, half.max(axis=0)


def coefficients(states):
    return np.array([[state.coef for state in row] for row in states])


@pytest.mark.parametrize("outlier", [1.0, 20.0, -20.0])
def test_one_outlier_moves_log_pi_little_and_not_for_long(outlier, loop_without_outlier):
    at, steps, calm = loop_without_outlier
    rule = KLCoefRule(rule="log_pi")
    _, states = closed_loops(
        rule,
        rates=[0.001, 0.003, 0.1],
        seeds=[0],
        steps=steps,
        measured=lambda step, kl: outlier if step == at else kl,
    )
    factors = coefficients(states) / calm
    assert (factors[:at] == 1).all()
    moved = np.abs(np.log(factors[at:]))
    assert moved.max() > 0.01
    assert moved.max() <= math.log(1.5)
    assert moved[30:].max() <= 0.1


@pytest.fixture(scope="module")
def loop_without_outlier():
    rule, steps = KLCoefRule(rule="log_pi"), 1700
    _, states = closed_loops(rule, rates=[0.001, 0.003, 0.1], seeds=[0], steps=steps)
    return 1500, steps, coefficients(states)


@given(st.lists(ANY_KL, max_size=80), st.floats(-1e6, 1e6))
def test_no_measurement_moves_log_pi_by_more_than_half(kls, outlier):
    rule = KLCoefRule(rule="log_pi", low=1e-300, high=1e300)
    state = KLCoefState(coef=0.01)
    for kl in [*kls, outlier]:
        before, state = state, update(rule, state, kl)
        assert abs(math.log(state.coef / before.coef)) <= math.log(1.5)


@pytest.mark.parametrize(("stuck", "after"), [(1.0, 0.0), (0.0, 1.0)])
def test_a_long_stay_at_a_bound_leaves_no_trace(stuck, after):
    rule = KLCoefRule(rule="log_pi", low=1e-3, high=1e-1)
    paths = []
    for stay in (700, 7000):
        state, path = KLCoefState(coef=0.01), []
        for kl in [stuck] * stay + [after] * 200:
            state = update(rule, state, kl)
            path.append(state.coef)
        paths.append(path[-200:])
    assert paths[0] == pytest.approx(paths[1], rel=1e-6)
    assert paths[0][0] != pytest.approx(paths[0][-1], rel=0.5)


def test_log_pi_holds_the_coefficient_while_a_slow_kl_is_on_its_way():
    rule, state = KLCoefRule(rule="log_pi"), KLCoefState(coef=0.3)
    for step in range(1, 1800):
        state = update(rule, state, TARGET * (step / 2000) ** 2)
    assert 0.1 < state.coef < 3.0
    assert state.response_steps == pytest.approx(1799 / 4, rel=0.01)


@pytest.mark.parametrize(("start", "steps"), [(30.0, 800), (0.03, 400)])
def test_log_pi_finds_a_coefficient_far_away_where_the_kl_follows_at_once(start, steps):
    rule, state = KLCoefRule(rule="log_pi"), KLCoefState(coef=start)
    for _ in range(steps):
        state = update(rule, state, TARGET * min((3.0 / state.coef) ** 2, 4.0))
    assert state.coef == pytest.approx(3.0, rel=0.1)


def test_a_state_from_before_the_response_was_measured_still_loads():
    old = {
        "coef": 0.05,
        "num_updates": 3,
        "smoothed_kl": 0.06,
        "error": 0.18,
        "num_above": 2.4,
        "saturated": None,
        "num_held": 0,
    }
    state = KLCoefState.from_json(old)
    assert (state.coef, state.smoothed_kl, state.num_updates) == (0.05, 0.06, 3)
    assert (state.num_off_target, state.response_steps) == (0, 20.0)
    assert update(KLCoefRule(rule="log_pi"), state, 0.06).coef > 0.05
    with pytest.raises(TypeError, match="phase"):
        KLCoefState.from_json({**old, "phase": 1})


@pytest.mark.parametrize("seed", range(3))
def test_the_band_rule_swings_at_every_step_and_not_every_twenty(seed):
    every_step, _ = closed_loop(KLCoefRule(rule="band", every=1, high=1e9), seed=seed)
    every_twenty, _ = closed_loop(KLCoefRule(rule="band", every=20), seed=seed)
    assert last_half(every_step)[1] > 0.5
    assert last_half(every_twenty)[1] < 0.3


def test_dual_ascent_and_a_slow_ziegler_settle_too():
    for rule in (KLCoefRule(rule="dual_ascent", step=0.1), KLCoefRule(rule="ziegler")):
        mean, spread = last_half(closed_loop(rule, seed=0)[0])
        assert 0.9 <= mean <= 1.1
        assert spread <= 0.10


def test_a_cap_that_is_too_low_is_reported():
    _, states = closed_loop(KLCoefRule(rule="log_pi", high=1.0), seed=0)
    assert states[-1].coef == 1.0
    assert states[-1].saturated == "high"


def test_one_nan_in_closed_loop_changes_that_step_only():
    rule = KLCoefRule(rule="log_pi")
    _, states = closed_loop(rule, seed=0, measured=lambda s, kl: math.nan if s == 700 else kl)
    assert states[700] == states[699]
    assert states[-1].num_updates == STEPS - 1


@given(ANY_RULE, st.lists(ANY_KL, max_size=30), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_measurement_that_is_not_finite_changes_nothing(rule, kls, bad):
    rule = KLCoefRule(rule=rule)
    state = KLCoefState(coef=0.01)
    for kl in kls:
        state = update(rule, state, kl)
        assert update(rule, state, bad) == state


@given(ANY_RULE, st.lists(ANY_KL, max_size=60))
def test_the_state_stays_within_bounds_and_survives_json(rule, kls):
    rule = KLCoefRule(rule=rule, low=1e-3, high=2.0, every=1, step=5.0, rate=1.0)
    state = KLCoefState(coef=0.01)
    for kl in kls:
        state = update(rule, state, kl)
        assert 1e-3 <= state.coef <= 2.0
        assert (state.saturated == "high") == (state.coef == 2.0)
        assert (state.saturated == "low") == (state.coef == 1e-3)
        assert KLCoefState.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.076, 1.5), (0.074, 1.0), (0.026, 1.0), (0.024, 0.75), (-1.0, 0.75)]
)
def test_the_band_rule_has_its_published_edges(kl, factor):
    rule = KLCoefRule(rule="band", target=TARGET, every=1)
    assert update(rule, KLCoefState(coef=0.01), kl).coef == pytest.approx(0.01 * factor)


def test_the_band_rule_waits_between_two_changes():
    rule = KLCoefRule(rule="band", every=3)
    state = KLCoefState(coef=0.01)
    coefs = []
    for _ in range(6):
        state = update(rule, state, 1.0)
        coefs.append(state.coef)
    assert coefs == pytest.approx([0.01, 0.01, 0.015, 0.015, 0.015, 0.0225])


def test_ziegler_is_clipped():
    rule = KLCoefRule(rule="ziegler", rate=0.5)
    assert update(rule, KLCoefState(coef=0.01), 1.0).coef == pytest.approx(0.01 * 1.1)
    assert update(rule, KLCoefState(coef=0.01), 0.055).coef == pytest.approx(0.01 * 1.05)
    assert update(rule, KLCoefState(coef=0.01), 0.0).coef == pytest.approx(0.01 * 0.9)


def test_dual_ascent_climbs_by_the_violation():
    rule = KLCoefRule(rule="dual_ascent", step=2.0, low=0.0)
    assert update(rule, KLCoefState(coef=0.1), 0.15).coef == pytest.approx(0.3)
    assert update(rule, KLCoefState(coef=0.01), 0.0).coef == 0.0


def test_log_pi_takes_no_logarithm_of_a_negative_kl():
    rule = KLCoefRule(rule="log_pi")
    after = update(rule, KLCoefState(coef=0.01), -0.001)
    assert after.error == -1.0
    assert after.coef == pytest.approx(0.01 * math.exp(-KP / 20))


@given(st.floats(1e-4, 1e3), st.sampled_from(["log_pi", "band", "ziegler", "dual_ascent"]))
def test_every_rule_reaches_its_bounds_and_says_so(high, name):
    rule = KLCoefRule(rule=name, low=high / 3, high=high, every=1, rate=1.0, step=1e3)
    for kl, bound, flag in ((5.0, rule.high, "high"), (0.0, rule.low, "low")):
        state = KLCoefState(coef=high / 2)
        for _ in range(300):
            state = update(rule, state, kl)
        assert (state.coef, state.saturated) == (bound, flag)


def test_log_pi_leaves_a_coefficient_of_zero():
    above = KLCoefState(coef=0.0, smoothed_kl=8 * TARGET, error=math.log(8))
    state = update(KLCoefRule(rule="log_pi"), above, 8 * TARGET)
    assert state.coef == pytest.approx(1e-5 * math.exp(KP * 3 / 20 * 1.05))


def test_rules_are_relative_to_their_own_target():
    rule = KLCoefRule(rule="dual_ascent", target=0.2, step=1.0)
    assert update(rule, KLCoefState(coef=0.1), 0.25).coef == pytest.approx(0.15)


@pytest.mark.parametrize("coef", [-1.0, math.nan, math.inf])
def test_a_coefficient_that_is_none_is_refused(coef):
    with pytest.raises(ConfigError, match="rewards distance from the reference"):
        KLCoefState(coef=coef)


SETTLED = KLCoefState(coef=0.01, num_updates=1000, smoothed_kl=TARGET, error=0.0)
KP = 0.08 * math.sqrt(20)


def test_log_pi_has_an_integral_and_a_proportional_part():
    rule = KLCoefRule(rule="log_pi")
    assert update(rule, SETTLED, TARGET).coef == pytest.approx(0.01)
    after = update(rule, SETTLED, TARGET * (1 + 30 * 0.09))
    assert after.error == pytest.approx(math.log(1.09))
    assert math.log(after.coef / 0.01) == pytest.approx(KP * (0.09 / 20 + math.log(1.09)))


def test_log_pi_averages_longer_and_pushes_harder_on_a_slow_policy():
    slow = replace(SETTLED, response_steps=400.0)
    after = update(KLCoefRule(rule="log_pi"), slow, TARGET * (1 + 40 * 0.05))
    assert after.smoothed_kl == pytest.approx(1.05 * TARGET)
    assert math.log(after.coef / 0.01) == pytest.approx(1.6 * (0.05 / 400 + math.log(1.05)))


def test_log_pi_moves_faster_the_longer_the_kl_stays_above_and_not_below():
    rule = KLCoefRule(rule="log_pi")
    for ratio, error, gains in ((2.0, 1.0, [1.05, 1.1, 1.15]), (0.5, -0.5, [1.0, 1.0, 1.0])):
        state = replace(SETTLED, smoothed_kl=ratio * TARGET, error=math.log(ratio))
        moves = []
        for _ in range(80):
            before, state = state, update(rule, state, ratio * TARGET)
            moves.append(math.log(state.coef / before.coef))
        assert moves[:3] == pytest.approx([KP * error / 20 * gain for gain in gains])
        assert moves[-1] == pytest.approx(KP * error / 20 * (4.0 if ratio > 1 else 1.0))
        assert state.response_steps == 20.0
        assert update(rule, state, ratio * TARGET).response_steps == pytest.approx(81 / 4)


def test_log_pi_forgets_a_stay_above_when_the_kl_is_below():
    rule = KLCoefRule(rule="log_pi")
    above = replace(SETTLED, num_off_target=50, mean_drift=1.0)
    near = update(rule, above, TARGET)
    assert (near.num_off_target, near.coef) == (50, pytest.approx(0.01))
    below = replace(above, smoothed_kl=0.5 * TARGET, error=math.log(0.5))
    assert update(rule, below, 0.5 * TARGET).num_off_target == -1


def test_fixed_stays_where_it_is_even_outside_the_bounds():
    assert update(KLCoefRule(rule="fixed"), KLCoefState(coef=0.0), 9.0).coef == 0.0


def test_a_warm_up_rises_from_zero():
    assert linear_warmup(0.5, step=0, warmup_steps=10) == 0.0
    assert linear_warmup(0.5, step=5, warmup_steps=10) == 0.25
    assert linear_warmup(0.5, step=0, warmup_steps=0) == 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {"target": 0.0},
        {"target": math.nan},
        {"low": 2.0, "high": 1.0},
        {"low": -1.0},
        {"high": math.inf},
        {"every": 0},
        {"rule": "log_pi", "low": 0.0},
        {"rule": "band", "low": 0.0},
        {"rate": -1.0},
        {"step": math.nan},
    ],
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError):
        KLCoefRule(**settings)


def test_rules_cover_what_a_recipe_may_say():
    assert set(RULES) == set(KLCoefRule.__annotations__["rule"].__args__)
