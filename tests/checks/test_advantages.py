"""Checks of groups and advantages, by advantages of klinic and by others."""

from dataclasses import replace

import numpy as np
import pytest

from evidence.records import full_record
from klinic.checks import Case, Verdict, advantage_explodes, equal_rewards, wrong_groups
from klinic.evidence.record import StepRecord, select_rows
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
    by_std = [("group_std", missed / np.float32(epsilon)) for epsilon in (1e-4, 1e-6)]  # TRL, verl
    for kind, advantage in (("group_mean", missed), *by_std):
        found = wrong_groups.CHECK(case(advantage, rewards, kind, group))
        assert found.verdict is Verdict.PASS


def test_groups_that_a_reset_split_are_wrong_however_well_their_advantages_fit():
    rewards = rewards_of(2)
    found = case(ADVANTAGES["group_mean"](rewards, GROUP), rewards, "group_mean")
    assert wrong_groups.CHECK(found).verdict is Verdict.PASS
    split = replace(found, record=replace(found.record, facts={"num_split_groups": 2}))
    finding = wrong_groups.CHECK(split)
    assert finding.verdict is Verdict.FAIL
    assert "2 groups" in finding.summary
    assert "reset()" in finding.summary


def test_a_row_without_a_reward_has_no_part():
    rewards = rewards_of(2)
    rewards[3] = np.nan
    given = ~np.isnan(rewards)
    advantage = np.zeros(len(rewards))
    advantage[given] = ADVANTAGES["leave_one_out"](rewards[given], GROUP[given])
    found = case(advantage, rewards, "leave_one_out")
    assert wrong_groups.CHECK(found).verdict is Verdict.PASS


@pytest.mark.parametrize("baseline", ["first", "largest", "none"])
def test_a_baseline_that_is_not_the_mean_is_no_explosion(baseline):
    rewards = (np.random.default_rng(7).random((GROUPS, SIZE)) < 0.3).astype(float)
    rewards[0] = [1, 0, 0, 0, 0, 0, 0, 0]
    base = {"first": rewards[:, :1], "largest": rewards.max(1, keepdims=True), "none": 0.0}
    advantage = (rewards - base[baseline]) / (rewards.std(1, keepdims=True) + 1e-4)
    found = case(advantage.reshape(-1), rewards.reshape(-1), "group_std")
    assert advantage_explodes.CHECK(found).verdict is Verdict.PASS
    finding = wrong_groups.CHECK(found)
    assert finding.verdict is Verdict.FAIL
    assert "baseline" in finding.summary


def test_odd_records_do_not_throw():
    record = full_record(lengths=(0, 0, 0))
    for check in (advantage_explodes, wrong_groups):
        check.CHECK(Case(record=record, run={"advantage": "group_std"}))


def moved_case(advantage, rewards, num_moved):
    found = case(advantage, rewards, "group_mean")
    return replace(found, record=replace(found.record, facts={"num_moved_rows": num_moved}))


def test_advantages_that_stay_behind_within_their_group_are_seen():
    """Every group still sums to 0: only the rows' ids show that they moved."""
    rewards = np.random.default_rng(0).random(GROUPS * SIZE)
    advantage = ADVANTAGES["group_mean"](rewards, GROUP)
    advantage[:SIZE] = np.roll(advantage[:SIZE], 1)
    assert wrong_groups.CHECK(moved_case(advantage, rewards, 0)).verdict is Verdict.PASS
    found = wrong_groups.CHECK(moved_case(advantage, rewards, SIZE))
    assert found.verdict is Verdict.FAIL
    assert "stayed behind" in found.summary


@pytest.mark.parametrize("seed", range(5))
def test_advantages_that_move_with_their_rows_pass(seed):
    rewards = rewards_of(seed)
    advantage = 3 * ADVANTAGES["group_mean"](rewards, GROUP)
    found = wrong_groups.CHECK(moved_case(advantage, rewards, GROUPS * SIZE))
    assert found.verdict is Verdict.PASS


def kept_case(found, kept, *, group_size=None):
    record = select_rows(found.record, np.flatnonzero(kept).tolist())
    return replace(found, record=record, run={**found.run, "group_size": group_size})


BOTH = pytest.mark.parametrize("check", [advantage_explodes, wrong_groups])
SOME_ROWS = (GROUP < 4) | (np.arange(GROUPS * SIZE) % SIZE < 2)  # two groups keep two rows


@BOTH
@pytest.mark.parametrize("group_size", [SIZE, None])
@pytest.mark.parametrize("seed", range(5))
def test_groups_that_lost_rows_are_left_out(check, group_size, seed):
    rewards = np.random.default_rng(seed).random(GROUPS * SIZE) ** 8
    rewards[-SIZE] = 100.0  # far above the bound of a group of two
    found = case(ADVANTAGES["group_std"](rewards, GROUP), rewards, "group_std")
    finding = check.CHECK(kept_case(found, SOME_ROWS, group_size=group_size))
    assert finding.verdict is Verdict.PASS


@BOTH
def test_without_a_whole_group_there_is_no_data(check):
    rewards = rewards_of(0)
    found = case(ADVANTAGES["group_std"](rewards, GROUP), rewards, "group_std")
    kept = np.arange(GROUPS * SIZE) % SIZE > 0
    finding = check.CHECK(kept_case(found, kept, group_size=SIZE))
    assert finding.verdict is Verdict.NO_DATA
    assert f"all of its {SIZE} completions" in finding.summary


def test_a_fault_in_a_whole_group_is_seen_among_others_that_lost_rows():
    rewards = rewards_of(1)
    shifted = ADVANTAGES["group_mean"](rewards, np.roll(GROUP, SIZE // 2))
    found = case(shifted, rewards, "group_mean")
    kept = kept_case(found, SOME_ROWS, group_size=SIZE)
    assert wrong_groups.CHECK(kept).verdict is Verdict.FAIL
    advantage = np.zeros(GROUPS * SIZE)
    advantage[0] = 1e4
    kept = kept_case(case(advantage, rewards, "group_std"), SOME_ROWS, group_size=SIZE)
    assert advantage_explodes.CHECK(kept).verdict is Verdict.FAIL


def test_a_part_of_a_batch_has_the_bound_of_the_whole():
    rewards = np.zeros(GROUPS * SIZE)
    rewards[0] = 1.0
    found = case(ADVANTAGES["batch"](rewards, GROUP), rewards, "batch")
    part = kept_case(found, np.arange(GROUPS * SIZE) < SIZE)
    assert advantage_explodes.CHECK(part).verdict is Verdict.FAIL
    facts = {"generation_rows": GROUPS * SIZE}
    sized = replace(part, record=replace(part.record, facts=facts))
    assert advantage_explodes.CHECK(sized).verdict is Verdict.PASS
    unsized = kept_case(found, SOME_ROWS)
    assert advantage_explodes.CHECK(unsized).verdict is Verdict.NO_DATA


def test_equal_rewards_in_groups_that_lost_rows_are_no_equal_groups():
    rewards = np.tile([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], GROUPS)
    found = case(np.zeros(GROUPS * SIZE), rewards, "group_mean")
    kept = kept_case(found, np.arange(GROUPS * SIZE) % SIZE < 2, group_size=SIZE)
    three = replace(kept, earlier=(kept.record, kept.record))
    assert equal_rewards.CHECK(three).verdict is Verdict.NO_DATA
    whole = replace(found, earlier=(found.record, found.record))
    assert equal_rewards.CHECK(whole).verdict is Verdict.PASS
    assert equal_rewards.CHECK(replace(three, run={})).verdict is Verdict.FAIL
