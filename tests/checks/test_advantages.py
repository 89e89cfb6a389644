"""Checks of groups and advantages, by advantages of klinic and by others."""

import numpy as np
import pytest

from evidence.records import full_record
from klinic.checks import Case, Verdict, advantage_explodes, wrong_groups
from klinic.evidence.record import StepRecord
from klinic.maths.advantage import ADVANTAGES

GROUPS, SIZE = 6, 8
GROUP = np.repeat(np.arange(GROUPS), SIZE)


def case(advantage, rewards, kind, group=GROUP):
    record = StepRecord(
        step=1,
        row_offsets=np.arange(len(group) + 1),
        group=group,
        token_ids=np.zeros(len(group), np.int64),
        loss_mask=np.ones(len(group), bool),
        reward=rewards,
        advantage=advantage,
    )
    return Case(record=record, run={"advantage": kind})


def rewards_of(seed):
    random = np.random.default_rng(seed)
    return (random.random(GROUPS * SIZE) < random.random()).astype(float)


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("seed", range(20))
def test_what_klinic_computes_passes(kind, seed):
    rewards = rewards_of(seed)
    found = case(ADVANTAGES[kind](rewards, GROUP), rewards, kind)
    assert advantage_explodes.CHECK(found).verdict is not Verdict.FAIL
    assert wrong_groups.CHECK(found).verdict is not Verdict.FAIL


def test_the_bound_is_reached_by_one_against_all_others_and_not_passed():
    rewards = np.zeros(GROUPS * SIZE)
    rewards[0] = 1.0
    found = advantage_explodes.CHECK(
        case(ADVANTAGES["group_std"](rewards, GROUP), rewards, "group_std")
    )
    assert found.verdict is Verdict.PASS
    assert found.measured["share_of_bound"] == pytest.approx(1.0)


def test_a_spread_without_oneself_is_impossible():
    rewards = np.zeros(GROUPS * SIZE)
    rewards[0] = 1.0
    advantage = np.zeros(GROUPS * SIZE)
    advantage[0] = 1e4
    found = case(advantage, rewards, "group_std")
    assert advantage_explodes.CHECK(found).verdict is Verdict.FAIL


def test_advantages_that_are_not_divided_have_no_bound():
    rewards = 1e4 * rewards_of(0)
    found = case(ADVANTAGES["leave_one_out"](rewards, GROUP), rewards, "leave_one_out")
    assert advantage_explodes.CHECK(found).verdict is Verdict.PASS


@pytest.mark.parametrize("kind", ["group_mean", "leave_one_out", "group_std"])
def test_groups_that_are_cut_elsewhere_do_not_sum_to_nothing(kind):
    rewards = rewards_of(1)
    advantage = ADVANTAGES[kind](rewards, np.roll(GROUP, SIZE // 2))
    assert wrong_groups.CHECK(case(advantage, rewards, kind)).verdict is Verdict.FAIL


@pytest.mark.parametrize("kind", ["group_mean", "leave_one_out", "group_std"])
@pytest.mark.parametrize("seed", range(10))
def test_whole_groups_that_change_places_are_seen(kind, seed):
    rewards = np.random.default_rng(seed).random(GROUPS * SIZE)
    advantage = ADVANTAGES[kind](rewards, GROUP)
    advantage[: 2 * SIZE] = np.roll(advantage[: 2 * SIZE], SIZE)
    found = wrong_groups.CHECK(case(advantage, rewards, kind))
    assert found.verdict is Verdict.FAIL
    assert found.measured["swapped"] == 2


def test_a_group_of_equal_rewards_that_is_given_anothers_advantages_is_seen():
    rewards = np.zeros(GROUPS * SIZE)
    rewards[:3] = 1.0
    advantage = np.roll(ADVANTAGES["leave_one_out"](rewards, GROUP), SIZE)
    found = wrong_groups.CHECK(case(advantage, rewards, "leave_one_out"))
    assert found.measured["swapped"] == 2


def test_advantages_of_other_rewards_than_the_recorded_are_nobodys():
    random = np.random.default_rng(3)
    rewards, shaped = random.random((2, GROUPS * SIZE))
    found = wrong_groups.CHECK(case(ADVANTAGES["group_std"](shaped, GROUP), rewards, "group_std"))
    assert found.verdict is Verdict.PASS


def test_advantages_that_are_all_0_are_no_other_groups():
    rewards = np.where(GROUP == 0, 0.0, np.random.default_rng(5).random(GROUPS * SIZE))
    found = wrong_groups.CHECK(case(np.zeros(GROUPS * SIZE), rewards, "group_mean"))
    assert found.verdict is not Verdict.FAIL


@pytest.mark.parametrize("reward", [0.1, 0.7, 300.1, -2.3])
@pytest.mark.parametrize("num", [3, 5, 6, 8])
def test_a_mean_of_equal_rewards_may_miss_them_by_its_rounding(reward, num):
    rewards = np.full(GROUPS * num, reward, np.float32)
    missed = np.full(GROUPS * num, np.spacing(np.float32(abs(reward))), np.float32)
    group = np.repeat(np.arange(GROUPS), num)
    for kind, advantage in (("group_mean", missed), ("group_std", missed / np.float32(1e-4))):
        found = wrong_groups.CHECK(case(advantage, rewards, kind, group))
        assert found.verdict is Verdict.PASS


def test_a_row_without_a_reward_has_no_part():
    rewards = rewards_of(2)
    rewards[3] = np.nan
    given = ~np.isnan(rewards)
    advantage = np.zeros(len(rewards))
    advantage[given] = ADVANTAGES["leave_one_out"](rewards[given], GROUP[given])
    found = case(advantage, rewards, "leave_one_out")
    assert wrong_groups.CHECK(found).verdict is Verdict.PASS


def test_odd_records_do_not_throw():
    record = full_record(lengths=(0, 0, 0))
    for check in (advantage_explodes, wrong_groups):
        check.CHECK(Case(record=record, run={"advantage": "group_std"}))
