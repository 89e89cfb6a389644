"""Advantages, by enumeration of all rewards a group can have."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from klinic.errors import ConfigError
from klinic.maths.advantage import ADVANTAGES, batch, group_mean, group_std, leave_one_out

SIZE, RATE = 4, 0.3
ONE_GROUP = np.zeros(SIZE, dtype=np.int64)


def slope(advantage):
    """Return E[A | right] - E[A | wrong] of the first member, over all rewards of the others."""
    mean = {}
    for own in (0.0, 1.0):
        mean[own] = sum(
            math.prod(RATE if other else 1 - RATE for other in others)
            * float(advantage(np.array([own, *others]), ONE_GROUP)[0])
            for others in itertools.product((0.0, 1.0), repeat=SIZE - 1)
        )
    return mean[1.0] - mean[0.0]


def test_leave_one_out_keeps_the_size_of_the_policy_gradient():
    assert slope(leave_one_out) == pytest.approx(1.0, rel=1e-12)


def test_the_group_mean_makes_it_smaller_by_one_over_the_group():
    assert slope(group_mean) == pytest.approx(1 - 1 / SIZE, rel=1e-12)


def test_the_group_std_makes_it_depend_on_the_rewards():
    # with k of n right, a right one has sqrt((n - k) / k) and a wrong one -sqrt(k / (n - k))
    expected = sum(
        math.comb(SIZE - 1, j)
        * RATE**j
        * (1 - RATE) ** (SIZE - 1 - j)
        * (math.sqrt((SIZE - 1 - j) / (j + 1)) + math.sqrt(j / (SIZE - j)))
        for j in range(SIZE)
    )
    assert slope(group_std) == pytest.approx(expected, rel=1e-12)
    assert slope(group_std) == pytest.approx(slope(batch), rel=1e-12)


@given(arrays(np.float64, 6, elements=st.floats(-1e3, 1e3)))
def test_no_advantage_passes_the_root_of_the_group_less_one(reward):
    group = np.array([0, 0, 0, 1, 1, 1])
    advantage = group_std(reward, group)
    assert np.abs(advantage).max() <= math.sqrt(2) + 1e-9
    assert np.abs(leave_one_out(reward, group)[:3].sum()) < 1e-9 * max(1, np.abs(reward).max())


@given(st.floats(-1e3, 1e3, width=32), st.sampled_from(sorted(set(ADVANTAGES) - {"none"})))
def test_equal_rewards_have_an_advantage_of_exactly_zero(value, name):
    reward = np.full(7, value, dtype=np.float32)
    assert (ADVANTAGES[name](reward, np.zeros(7, dtype=np.int64)) == 0).all()


@given(st.permutations(range(6)))
def test_the_order_of_the_rows_does_not_matter(order):
    reward = np.array([1.0, 0.0, 3.0, 2.0, 2.0, 0.5])
    group = np.array([0, 1, 0, 1, 1, 0])
    for advantage in ADVANTAGES.values():
        straight = advantage(reward, group)[list(order)]
        shuffled = advantage(reward[list(order)], group[list(order)])
        np.testing.assert_allclose(shuffled, straight, rtol=1e-12, atol=1e-12)


def test_groups_may_have_any_numbers():
    reward = np.array([1.0, 0.0, 3.0, 2.0])
    plain = np.array([0, 1, 0, 1])
    odd = np.array([10**12, -7, 10**12, -7])
    for advantage in ADVANTAGES.values():
        np.testing.assert_array_equal(advantage(reward, odd), advantage(reward, plain))


def test_batch_looks_across_groups():
    reward, group = np.array([3.0, 3.0, 1.0, 1.0]), np.array([0, 0, 1, 1])
    assert batch(reward, group).tolist() == [1.0, 1.0, -1.0, -1.0]


@pytest.mark.torch
def test_half_precision_rewards_are_refused():
    import torch

    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ConfigError, match="Convert them to float32"):
            group_std(torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=torch.int64))


def test_the_default_floor_leaves_ordinary_spreads_alone():
    reward = np.array([0.001, 0.0])
    assert group_std(reward, np.array([0, 0])).tolist() == pytest.approx([1.0, -1.0])


def test_a_group_of_one_has_nothing_to_compare():
    assert leave_one_out(np.array([5.0]), np.array([0])).tolist() == [0.0]


def test_the_floor_is_a_floor_not_an_addition():
    reward, group = np.array([3.0, 1.0]), np.array([0, 0])
    assert group_std(reward, group, floor=0.5).tolist() == [1.0, -1.0]
    assert group_std(reward, group, floor=2.0).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("advantage", [group_std, batch])
def test_a_floor_of_zero_is_refused(advantage):
    with pytest.raises(ConfigError, match="divide by zero"):
        advantage(np.zeros(2), np.zeros(2, dtype=np.int64), floor=0.0)
