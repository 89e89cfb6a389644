"""Warning signs: by hand, on runs that are healthy, and with each limit broken once."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doctor.traces import HEALTHY, STEPS, noise, run, signs_of
from klinic.doctor import warning_signs
from klinic.doctor.warning_signs import (
    DRIFT,
    STILL,
    KLLimits,
    WarningState,
    kl_limits,
    slope,
    watch_step,
)
from klinic.recipe.sections import KLSection

# no better than it was at first, and noisy
LONG = np.concatenate([np.full(10, 0.6), np.tile([0.6, 0.5], STEPS - 5)])
FLAT = LONG[:STEPS]
FAR_AND_FLAT = run(np.full(STEPS, 0.201), FLAT)
FAR_ALLOWED = run(np.full(STEPS, 0.2), FLAT)
COLLAPSE = run(
    np.concatenate([np.full(100, 0.1), np.full(40, 0.5)]),
    np.concatenate([np.linspace(0.3, 0.8, 100), np.linspace(0.8, 0.0, 40)]),
)
STILL_AND_FLAT = run(np.full(STEPS, 0.0099), FLAT)
STILL_ALLOWED = run(np.full(STEPS, 0.01), FLAT)
BACK_AND_FORTH = run(np.repeat([0.3, 0.1, 0.3], [120, 105, 375]), LONG)
EASED = run(np.repeat([0.3, 0.1, 0.3], [120, 3, 477]), LONG)


@pytest.mark.parametrize("trace", HEALTHY)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1))
def test_healthy_runs_give_no_sign(trace, seed):
    assert signs_of(trace(np.random.default_rng(seed))) == []


def test_far_from_the_reference_for_a_hundred_steps_and_nothing_gained_is_drift():
    assert signs_of(FAR_AND_FLAT) == [(109, DRIFT)]
    assert signs_of(FAR_ALLOWED) == []


def test_a_reward_that_falls_while_the_policy_is_far_is_drift_within_steps():
    ((step, name),) = signs_of(COLLAPSE)
    assert name == DRIFT
    assert 105 < step <= 125


def test_a_kl_near_zero_without_a_rise_is_not_learning_after_a_hundred_steps():
    assert signs_of(STILL_AND_FLAT) == [(100, STILL)]
    assert signs_of(STILL_ALLOWED) == []


@pytest.mark.parametrize("why", [{"equal": 1.0}, {"rate": 0.0}, {"reward_scale": 0.5}])
def test_where_nothing_can_be_learnt_nobody_is_told_to_learn(why):
    assert signs_of(run(np.full(STEPS, 0.001), FLAT, **why)) == []


def test_a_sign_is_told_again_only_after_it_cleared():
    assert signs_of(BACK_AND_FORTH) == [(109, DRIFT), (330, DRIFT)]
    assert signs_of(EASED) == [(109, DRIFT)]


def test_a_rise_below_its_noise_is_no_rise_and_one_above_it_is():
    stream = np.random.default_rng(0)
    kl = np.full(STEPS, 0.001)
    assert signs_of(run(kl, noise(stream))) != []
    assert signs_of(run(kl, np.linspace(0, 1, STEPS) + noise(stream))) == []


def test_a_target_that_was_asked_for_is_not_a_fault():
    far, near = (KLSection(controller="log_pi", target=t) for t in (0.2, 0.004))
    assert kl_limits(far) == KLLimits(far=0.8, near=0.01)
    assert kl_limits(near) == KLLimits(far=0.2, near=0.001)
    assert kl_limits(KLSection(coef=0.1)) == kl_limits(None) == KLLimits()
    assert signs_of(run(np.full(STEPS, 0.4), FLAT), kl_limits(far)) == []
    assert signs_of(run(np.full(STEPS, 0.004), FLAT), kl_limits(near)) == []


def test_the_sentence_has_figure_limit_and_unit():
    state = WarningState()
    new = []
    for row in FAR_AND_FLAT:
        watched = watch_step(state, row, KLLimits())
        state, new = watched.signs, new + watched.new
    (sign,) = new
    assert "0.201 nats per token (median of 10 steps, limit 0.2)" in sign.sentence
    assert sign.facts["figure"] == pytest.approx(0.201)
    assert sign.facts["unit"] == "nats per token"


@pytest.mark.parametrize("rows", [FAR_AND_FLAT, COLLAPSE, STILL_AND_FLAT, BACK_AND_FORTH])
def test_a_state_that_went_through_json_sees_the_same(rows):
    state, told = WarningState(), []
    for step, row in enumerate(rows, 1):
        state = WarningState.from_json(json.loads(json.dumps(state.to_json(), allow_nan=False)))
        watched = watch_step(state, row, KLLimits())
        state = watched.signs
        told += [(step, sign.name) for sign in watched.new]
    assert told == signs_of(rows)


def test_a_slope_is_that_of_least_squares():
    stream = np.random.default_rng(0)
    y = [float(value) for value in stream.normal(size=30)]
    fit, covariance = np.polyfit(np.arange(30), y, 1, cov=True)
    assert slope(y).value == pytest.approx(fit[0])
    assert slope(y).error == pytest.approx(math.sqrt(covariance[0, 0]))


SICK = (FAR_AND_FLAT, FAR_ALLOWED, COLLAPSE, STILL_AND_FLAT, EASED)
EXPECTED = [(rows, signs_of(rows)) for rows in SICK]
MUTANTS = {
    "the reward does not matter": ("_reward_did_not_rise", lambda _signs: True),
    "any drift is worth it": ("_reward_did_not_rise", lambda _signs: False),
    "a fall is not looked for": ("FALL", math.inf),
    "any dip is a fall": ("FALL", 0.0),
    "less patience": ("PATIENCE", 99),
    "a shorter memory": ("MEMORY", 5),
    "two steps are enough": ("WINDOW", 2),
    "a step less": ("MIN_LEARNABLE", 99),
    "a rise is noise": ("RISE", 30.0),
    "everything teaches": ("_is_learnable", lambda _metrics: True),
    "nothing teaches": ("_is_learnable", lambda _metrics: False),
    "told for ever": (
        "update_sign",
        lambda s, n, t, sign: warning_signs.WarningUpdate(signs=s, new=[sign()]),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_part_matters(mutant, monkeypatch):
    monkeypatch.setattr(warning_signs, *MUTANTS[mutant])
    sick = any(signs_of(rows) != expected for rows, expected in EXPECTED)
    assert sick or any(signs_of(trace(np.random.default_rng(0))) for trace in HEALTHY)
