"""Rules that move the coefficient: by hand, and in closed loop with a policy they steer."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.errors import ConfigError
from klinic.maths.kl_coef import RULES, KLCoefRule, KLCoefState, linear_warmup, update
from maths.plant import STEPS, closed_loop

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
    assert after.coef == pytest.approx(0.01 * math.exp(-0.03))


@given(st.floats(1e-4, 1e3), st.sampled_from(["log_pi", "band", "ziegler", "dual_ascent"]))
def test_every_rule_reaches_its_bounds_and_says_so(high, name):
    rule = KLCoefRule(rule=name, low=high / 3, high=high, every=1, rate=1.0, step=1e3)
    for kl, bound, flag in ((5.0, rule.high, "high"), (0.0, rule.low, "low")):
        state = KLCoefState(coef=high / 2)
        for _ in range(300):
            state = update(rule, state, kl)
        assert (state.coef, state.saturated) == (bound, flag)


def test_log_pi_leaves_a_coefficient_of_zero():
    state = update(KLCoefRule(rule="log_pi"), KLCoefState(coef=0.0), 1.0)
    assert state.coef == pytest.approx(1e-5 * math.exp(0.03 * 1.2))


def test_rules_are_relative_to_their_own_target():
    rule = KLCoefRule(rule="dual_ascent", target=0.2, step=1.0)
    assert update(rule, KLCoefState(coef=0.1), 0.25).coef == pytest.approx(0.15)


@pytest.mark.parametrize("coef", [-1.0, math.nan, math.inf])
def test_a_coefficient_that_is_none_is_refused(coef):
    with pytest.raises(ConfigError, match="rewards distance from the reference"):
        KLCoefState(coef=coef)


def test_log_pi_has_an_integral_and_a_proportional_part():
    rule = KLCoefRule(rule="log_pi")
    first = update(rule, KLCoefState(coef=0.01), TARGET)
    assert first.coef == pytest.approx(0.01)
    second = update(rule, first, TARGET * (1 + 10 * (math.e**0.5 - 1)))
    assert second.error == pytest.approx(0.5)
    assert math.log(second.coef / 0.01) == pytest.approx(0.03 * 1.2 * 0.5 + 0.4 * 0.5)


def test_log_pi_moves_faster_the_longer_the_kl_stays_above_and_not_below():
    rule = KLCoefRule(rule="log_pi")
    for kl, gains in ((1.0, [1.2, 1.4, 1.6, 1.8]), (1e-9, [1.0, 1.0, 1.0, 1.0])):
        state, moves = KLCoefState(coef=0.01), []
        for _ in range(40):
            before, state = state, update(rule, state, kl)
            moves.append(abs(math.log(state.coef / before.coef)))
        assert moves[:4] == pytest.approx([0.03 * gain for gain in gains])
        assert moves[-1] == pytest.approx(0.09 if kl == 1.0 else 0.03)


def test_log_pi_forgets_a_stay_above_when_it_is_over():
    rule = KLCoefRule(rule="log_pi")
    state = KLCoefState(coef=0.01, smoothed_kl=TARGET, error=0.0, num_above=20.0)
    for _ in range(30):
        state = update(rule, state, TARGET)
    assert state.num_above == pytest.approx(20 * 0.8**30)
    assert state.coef == pytest.approx(0.01)


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
