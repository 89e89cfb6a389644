"""Which KL a controller acts on, and what it says when it can do no more."""

import math
from dataclasses import replace

import numpy as np
import pytest

from klinic.evidence.metrics import kl_metrics, mean_k1
from klinic.maths.kl_coef import KLCoefState
from klinic.recipe.sections import KLSection
from klinic.training.kl_control import (
    MAX_SATURATED_STEPS,
    controller_metrics,
    saturation_notice,
    update_kl_coef,
)
from tiny_policies import batch_of, rollouts

LOG_PI = KLSection(controller="log_pi", target=0.05)
CAPPED = KLSection(controller="log_pi", target=0.05, coef=0.01, max_coef=0.01)


def after(kls, section=CAPPED):
    """Return the states of a controller, and what it said, along measured KLs."""
    state, said = KLCoefState(coef=section.coef), []
    for step, kl in enumerate(kls, 1):
        new = update_kl_coef(section, state, kl, done_steps=step)
        said += [found for found in [saturation_notice(section, state, new, kl)] if found]
        state = new
    return state, said


def test_before_the_first_update_the_kl_says_nothing_about_the_coefficient():
    state = KLCoefState(coef=0.01)
    assert update_kl_coef(LOG_PI, state, 0.0, done_steps=0) == state
    assert update_kl_coef(LOG_PI, state, 0.01, done_steps=1).coef < 0.01


def test_what_was_not_measured_or_is_not_asked_for_changes_nothing():
    state = KLCoefState(coef=0.01)
    assert update_kl_coef(LOG_PI, state, None, done_steps=5) == state
    assert update_kl_coef(None, state, 1.0, done_steps=5) == state
    assert update_kl_coef(LOG_PI, None, 1.0, done_steps=5) is None


def test_a_stay_is_told_when_it_is_longer_than_ten_steps_and_once():
    assert after([1.0] * MAX_SATURATED_STEPS)[1] == []
    assert len(after([1.0] * (MAX_SATURATED_STEPS + 1))[1]) == 1
    assert len(after([1.0] * 50)[1]) == 1


def test_a_kl_that_is_not_a_number_does_not_tell_a_stay_again():
    kls = [1.0] * (MAX_SATURATED_STEPS + 1) + [math.nan] * 3 + [1.0]
    assert len(after(kls)[1]) == 1


def test_a_second_stay_is_told_again():
    stay = [0.1] * (MAX_SATURATED_STEPS + 1)
    assert len(after(stay + [1e-9] * 60 + stay * 8)[1]) == 2


def test_the_lower_bound_asks_for_a_lower_target():
    state, said = after([1e-6] * 1000, LOG_PI)
    assert (state.coef, state.saturated) == (1e-5, "low")
    assert "Lower kl.target" in said[0].message
    assert said[0].facts["bound"] == "low"
    assert controller_metrics(LOG_PI, state) == {"kl_target": 0.05, "kl_coef/saturated": -1.0}


def test_a_cap_below_the_usual_lower_bound_is_obeyed():
    tiny = KLSection(controller="log_pi", coef=1e-7, max_coef=1e-6)
    assert after([1.0] * 20, tiny)[0].coef == 1e-6


@pytest.mark.parametrize("hole", [0, 3])
def test_mean_k1_is_the_metric_of_that_name(hole):
    record = batch_of(rollouts())
    stream = np.random.default_rng(0)
    logp_old, logp_ref = -stream.random((2, record.num_tokens))
    logp_ref[:hole] = np.nan
    record = replace(record, logp_old=logp_old, logp_ref=logp_ref)
    assert mean_k1(record) == kl_metrics(record)["kl_k1/mean"]


def test_without_a_reference_there_is_no_k1():
    assert mean_k1(batch_of(rollouts())) is None
