"""What counts as trouble, by exact small cases."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.doctor.anomalies import (
    MIN_NORMS,
    MIN_REWARDS,
    SITES,
    WINDOW,
    AnomalyLimits,
    History,
    check_batch_reward,
    check_grad_norm,
    check_history,
    check_update_kl,
    is_healthy,
    non_finite,
    usual_grad_norm,
    with_grad_norm,
    with_kl,
    with_reward,
)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)


def after(rewards):
    history = History()
    for step, reward in enumerate(rewards, 1):
        history = with_reward(history, step, reward)
    return history


@given(st.sets(st.sampled_from(SITES), min_size=1))
def test_the_first_cause_is_named_and_not_what_it_led_to(broken):
    trouble = non_finite({site: site not in broken for site in SITES})
    assert trouble.site == min(broken, key=SITES.index)
    assert trouble.damaged == (trouble.site in {"weights", "optimizer"})


def test_numbers_are_no_trouble():
    assert non_finite(dict.fromkeys(SITES, True)) is None
    assert non_finite({}) is None


def test_a_gradient_is_held_against_recent_ones_once_there_are_enough():
    history, limits = History(), AnomalyLimits(grad_norm=3.0)
    for number in range(MIN_NORMS):
        assert check_grad_norm(limits, history, 1e9) is None, number
        history = with_grad_norm(history, 2.0)
    assert usual_grad_norm(history) == 2.0
    assert check_grad_norm(limits, history, 6.0) is None
    trouble = check_grad_norm(limits, history, 6.1)
    assert (trouble.measured, trouble.limit, trouble.damaged) == (6.1, 6.0, False)
    assert str(trouble) == "gradient norm 6.1, limit 6"
    assert check_grad_norm(AnomalyLimits(), history, 1e9) is None


def test_gradients_of_nothing_do_not_make_every_other_one_too_long():
    history = History()
    for _ in range(WINDOW):
        history = with_grad_norm(history, 0.0)
    assert usual_grad_norm(history) is None
    assert check_grad_norm(AnomalyLimits(grad_norm=2.0), history, 1.0) is None


def test_behind_an_update_of_the_batch_a_long_gradient_is_damage():
    history = History(grad_norms=(1.0,) * WINDOW)
    assert check_grad_norm(AnomalyLimits(grad_norm=2.0), history, 3.0, damaged=True).damaged


@pytest.mark.parametrize(
    ("kl", "reward", "well"),
    [
        (0.25, 0.6, True),
        (0.26, 0.6, False),
        (0.1, 0.5, True),
        (0.1, 0.49, False),
        (None, None, True),
    ],
)
def test_a_state_to_go_back_to_is_within_half_of_the_limits(kl, reward, well):
    limits = AnomalyLimits(kl=0.5, reward_drop=0.4)
    assert is_healthy(limits, History(kl=kl, reward=reward), best_reward=0.7) is well
    assert is_healthy(AnomalyLimits(), History(kl=9.0, reward=-9.0), best_reward=0.7)


def test_the_quantile_forgets():
    history = History(grad_norms=(9.0,) * WINDOW)
    for _ in range(WINDOW):
        history = with_grad_norm(history, 1.0)
    assert usual_grad_norm(history) == 1.0


def test_a_few_long_gradients_do_not_raise_the_bar():
    history = History(grad_norms=(1.0,) * 46 + (100.0,) * 4)
    assert usual_grad_norm(history) == 1.0


def test_only_an_update_that_ruined_the_policy_is_trouble():
    limits = AnomalyLimits(update_kl=0.02)
    # one update too many is what the limit itself is for
    assert check_update_kl(limits, 0.2) is None
    trouble = check_update_kl(limits, 0.21)
    assert (trouble.kind, trouble.damaged) == ("update KL", True)
    assert check_update_kl(AnomalyLimits(), 1e9) is None
    assert check_update_kl(limits, None) is None


def drifting(kls):
    history = History()
    for kl in kls:
        history = with_kl(history, kl)
    return history


def test_too_far_from_the_reference():
    limits = AnomalyLimits(kl=0.5)
    assert check_history(limits, History()) is None
    assert check_history(limits, drifting([0.5] * 9)) is None
    assert str(check_history(limits, drifting([0.51] * 9))) == "KL 0.51 nats per token, limit 0.5"
    assert check_history(AnomalyLimits(), drifting([9.0] * 9)) is None


def test_a_spike_that_recovers_is_no_trouble_and_one_that_stays_is():
    limits, calm = AnomalyLimits(kl=0.5), [0.1] * 20
    spike = [check_history(limits, drifting([*calm, 2.0, *[0.1] * n])) for n in range(5)]
    assert spike == [None] * 5
    stays = [check_history(limits, drifting([*calm, *[2.0] * n])) is not None for n in range(1, 4)]
    assert stays == [False, True, True]


def test_the_first_few_are_averaged_so_that_a_bad_start_is_seen_at_once():
    assert drifting([0.0, 1.0, 2.0]).kl == pytest.approx(1.0)
    assert drifting([0.0, 1.0, math.nan, 2.0]) == drifting([0.0, 1.0, 2.0])
    assert after([0.2, 0.4]).reward == pytest.approx(0.3)


def test_a_reward_that_is_lost():
    well = after([0.8] * 20)
    assert check_history(AnomalyLimits(reward_drop=0.3), well) is None
    lost = after([0.8] * 20 + [0.0] * 5)
    assert lost.reward == pytest.approx(0.8 * 0.9**5)
    assert (lost.best_reward, lost.best_step) == (pytest.approx(0.8), well.best_step)
    assert check_history(AnomalyLimits(reward_drop=0.33), lost) is None
    trouble = check_history(AnomalyLimits(reward_drop=0.32), lost)
    assert (trouble.kind, trouble.may_be_transient, trouble.blames_batch) == (
        "reward",
        False,
        False,
    )


def test_a_batch_that_earns_far_less_than_its_noise_explains():
    noisy = History(rewards=(0.5, 0.7) * 10)
    spread = 4 * math.sqrt(20 * 0.01 / 19)
    limits = AnomalyLimits(reward_drop=0.1)
    assert check_batch_reward(limits, noisy, 0.6 - spread + 1e-9) is None
    trouble = check_batch_reward(limits, noisy, 0.6 - spread - 1e-9)
    assert (trouble.kind, trouble.may_be_transient, trouble.damaged) == (
        "batch reward",
        True,
        False,
    )
    # a fall that does not matter
    assert check_batch_reward(AnomalyLimits(reward_drop=0.5), noisy, 0.11) is None
    assert check_batch_reward(AnomalyLimits(reward_drop=0.5), noisy, 0.09) is not None
    assert check_batch_reward(AnomalyLimits(), noisy, -9.0) is None
    assert check_batch_reward(limits, History(rewards=(0.5,) * (MIN_REWARDS - 1)), 0.0) is None
    assert check_batch_reward(limits, noisy, math.nan) is None


def test_one_lucky_batch_at_the_start_is_no_best():
    assert after([1.0, 0.0, 0.0, 0.0]).best_reward is None
    assert after([1.0, 0.0, 0.0, 0.0, 0.0]).best_reward == pytest.approx(0.2)


@given(st.lists(st.one_of(NUMBERS, st.just(math.nan), st.none()), max_size=30), NUMBERS)
def test_what_is_not_a_number_changes_nothing(rewards, more):
    history = after(rewards)
    for bad in (math.nan, math.inf, -math.inf, None):
        assert with_reward(history, 99, bad) == history
    assert with_reward(history, 99, more).rewards[-1] == more


@given(st.lists(NUMBERS, max_size=30), st.lists(NUMBERS, max_size=60))
def test_history_survives_json_bit_for_bit(rewards, norms):
    history = after(rewards)
    for norm in norms:
        history = with_grad_norm(history, norm)
    assert History.from_json(json.loads(json.dumps(history.to_json()))) == history
