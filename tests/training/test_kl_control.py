"""Which KL a controller acts on, and what it says when it can do no more."""

import math
from dataclasses import replace

import numpy as np
import pytest

import klinic
from klinic.evidence.files import Journal
from klinic.evidence.metrics import kl_metrics, mean_k1
from klinic.maths.kl_coef import KLCoefState
from klinic.recipe.sections import KLSection, ReferenceSection
from klinic.training.kl_control import (
    MAX_SATURATED_STEPS,
    controller_metrics,
    saturation_notice,
    update_kl_coef,
)
from klinic.training.reference_updates import last_reset
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


def test_after_a_reset_of_the_reference_the_kl_says_nothing_either():
    state = KLCoefState(coef=0.01)
    assert update_kl_coef(LOG_PI, state, 0.0, done_steps=6, reference_step=6) == state
    assert update_kl_coef(LOG_PI, state, 0.01, done_steps=7, reference_step=6).coef < 0.01


def test_an_average_of_the_policy_moves_without_a_reset():
    record = replace(batch_of(rollouts()), facts={"reference_step": 6})
    assert last_reset(ReferenceSection(reset_every=2), record) == 6
    assert last_reset(ReferenceSection(ema=0.9), record) == 0
    assert last_reset(ReferenceSection(), replace(record, facts={"reference_step": None})) == 0


@pytest.mark.usefixtures("as_before")
def test_a_run_skips_the_kl_of_the_step_after_a_reset(tmp_path):
    klinic.train(
        model="tiny",
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        train_dataset=[{"prompt": f"{n}+{n}="} for n in range(20)],
        **{
            "reference.reset_every": 2,
            "kl.controller": "dual_ascent",
            "kl.target": 1e-9,
            "learning_rate": 1e-3,
            "max_steps": 4,
            "prompts_per_step": 2,
            "group_size": 2,
            "max_new_tokens": 4,
            "output.trackers": [],
            "output.doctor": "none",
            "threads": 1,
            "output.dir": str(tmp_path),
        },
    )
    lines = [line for line in Journal(tmp_path / "metrics.jsonl").entries() if "loss" in line]
    assert [line["kl"] == 0 for line in lines] == [True, False, True, False]
    coefs = [line["kl_coef"] for line in lines]
    assert coefs[0] == coefs[1] != coefs[2] == coefs[3]
