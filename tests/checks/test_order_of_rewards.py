"""Rewards and advantages of other rows, shared random streams, scaled noise, ends of prompts."""

from dataclasses import replace

import numpy as np
import pytest

from checks.exact_records import GROUP, LENGTH, ROWS, VOCABULARY, case, judged, record
from klinic.checks import (
    Verdict,
    advantage_explodes,
    broken_reward,
    broken_sampler,
    context_truncated,
    equal_rewards,
    policy_does_not_move,
    stop_token_fault,
    wrong_groups,
)
from klinic.checks.reward_order import find_reward_order

PASS, FAIL, WARN, NO_DATA = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.NO_DATA
DIVIDED = {"advantage": "group_std"}
NUM_ROWS, SIZE = 64, 8
ORDERS = {
    "in reverse": lambda reward, _: reward[::-1],
    "one row late": lambda reward, _: np.roll(reward, 1),
    "three rows late": lambda reward, _: np.roll(reward, 3),
    "one group late": lambda reward, _: np.roll(reward, SIZE),
    "exchanged": lambda reward, _: reward.reshape(-1, SIZE).T.reshape(-1),
    "shortest first": lambda reward, lengths: reward[np.argsort(lengths, kind="stable")],
    "longest first": lambda reward, lengths: reward[np.argsort(-lengths, kind="stable")],
}


def answers(step, seed=0):
    """Return short completions, several of each prompt equal, and their true rewards."""
    random = np.random.default_rng([seed, step])
    group = np.repeat(np.arange(NUM_ROWS // SIZE), SIZE)
    kind = random.integers(0, 3, NUM_ROWS)
    lengths = 2 + kind
    rows = zip(group, kind, strict=True)
    tokens = np.concatenate([[10 + number, *[20 + k] * (1 + k)] for number, k in rows])
    right = random.integers(0, 3, NUM_ROWS // SIZE)
    reward = (kind == right[group]).astype(float)
    made = record(step=step)
    return replace(
        made,
        step=step,
        row_offsets=np.concatenate([[0], np.cumsum(lengths)]),
        token_ids=tokens,
        group=group,
        sample=np.arange(NUM_ROWS) % SIZE,
        loss_mask=np.ones(len(tokens), bool),
        reward=reward,
        **dict.fromkeys(
            ("advantage", "logp", "logp_old", "logp_ref", "logp_sampler", "entropy", "emitted_by")
        ),
        **dict.fromkeys(("weight_version", "cached_tokens", "prompt_ids_match", "round_trip")),
        finish_reason=None,
    ), lengths


def judged_rewards(records):
    return judged(broken_reward, records[-1], earlier=records[:-1])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(3))
def test_rewards_in_another_order_are_put_back(order, seed):
    records = []
    for step in range(1, 5):
        found, lengths = answers(step, seed)
        records.append(replace(found, reward=ORDERS[order](found.reward, lengths)))
    assert find_reward_order(case(records[-1], earlier=records[:-1]))
    assert judged_rewards(records) is FAIL


@pytest.mark.parametrize("lag", [1, -1])
def test_rewards_of_a_neighbouring_step_are_found(lag):
    made = [answers(step)[0] for step in range(1, 7)]
    pairs = zip(made[1:-1], made[1 - lag : len(made) - 1 - lag], strict=True)
    records = [replace(here, reward=there.reward) for here, there in pairs]
    assert judged_rewards(records) is FAIL


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.25])
def test_a_judge_that_errs_now_and_then_grades_in_order(noise, seed):
    random = np.random.default_rng(seed)
    records = []
    for step in range(1, 7):
        found, _ = answers(step, seed)
        errs = random.random(NUM_ROWS) < noise
        records.append(replace(found, reward=np.where(errs, 1 - found.reward, found.reward)))
    assert find_reward_order(case(records[-1], earlier=records[:-1])) == ""


class TestCopiedAdvantages:
    def found(self, seed=0):
        found = record(seed)
        reward = np.random.default_rng(seed).normal(size=ROWS)
        table = reward.reshape(-1, GROUP)
        return found, reward, (table - table.mean(1, keepdims=True)) * GROUP / (GROUP - 1)

    @pytest.mark.parametrize("seed", range(5))
    def test_those_of_the_first_half_are_seen(self, seed):
        found, reward, advantage = self.found(seed)
        half = len(advantage) // 2
        copied = np.concatenate([advantage[:half], advantage[:half]]).reshape(-1)
        found = replace(found, reward=reward)
        assert judged(wrong_groups, replace(found, advantage=copied)) is FAIL
        assert judged(wrong_groups, replace(found, advantage=advantage.reshape(-1))) is PASS

    def test_those_of_opposite_sign_are_seen(self):
        found, reward, advantage = self.found()
        found = replace(found, reward=reward, advantage=-advantage.reshape(-1))
        assert judged(wrong_groups, found) is FAIL

    def test_other_rewards_than_the_recorded_ones_are_a_choice(self):
        found, reward, _ = self.found()
        other = self.found(seed=9)[2].reshape(-1)
        assert judged(wrong_groups, replace(found, reward=reward, advantage=other)) is PASS


class TestTwins:
    def found(self, step=1, shared=()):
        found = record(seed=step, step=step)
        ids, logp = (np.array(c).reshape(ROWS, LENGTH) for c in (found.token_ids, found.logp_old))
        for one, other in shared:
            ids[other::GROUP], logp[other::GROUP] = ids[one::GROUP], logp[one::GROUP]
        flat = logp.reshape(-1)
        return replace(found, token_ids=ids.reshape(-1), logp_old=flat, logp_sampler=flat)

    def test_two_samples_of_one_stream_are_seen(self):
        assert judged(broken_sampler, self.found(shared=[(0, 1)])) is FAIL
        assert judged(broken_sampler, self.found()) is PASS

    def test_one_group_in_which_they_differ_clears_them(self):
        # six groups: one pair less than the count of equal pairs alone would name
        found = self.found(shared=[(0, 1)])
        ids = found.token_ids.copy()
        ids[LENGTH] = (ids[LENGTH] + 1) % VOCABULARY
        assert judged(broken_sampler, replace(found, token_ids=ids)) is PASS

    def test_certain_completions_are_equal_by_right(self):
        found = self.found(shared=[(0, 1)])
        certain = np.full(found.num_tokens, -1e-3)
        found = replace(found, logp_old=certain, logp_sampler=certain)
        assert judged(broken_sampler, found) is PASS

    def test_updates_on_one_generation_count_once(self):
        found = self.found(shared=[(0, 1)])
        likely = np.full(found.num_tokens, -0.3)  # e^-18 for one generation
        found = replace(found, logp_old=likely, logp_sampler=likely)
        again = [replace(found, step=step) for step in (2, 3)]
        assert judged(broken_sampler, again[-1], earlier=(found, again[0])) is PASS


class TestScaledNoise:
    def found(self, size, *, equal=True):
        """Return groups, half of which differ by 1 and half by noise of a size."""
        found, random = record(), np.random.default_rng(0)
        reward = size * random.normal(size=(ROWS // GROUP, GROUP))
        reward[::2, 0] += 1.0
        advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-6)
        ids = found.token_ids.reshape(ROWS, LENGTH).copy()
        if equal:
            ids[3::GROUP] = ids[2::GROUP]
        return replace(
            found,
            reward=reward.reshape(-1),
            advantage=advantage.reshape(-1),
            token_ids=ids.reshape(-1),
        )

    def test_noise_that_becomes_an_advantage_is_seen(self):
        assert judged(advantage_explodes, self.found(1e-3), run=DIVIDED) is FAIL

    def test_rewards_of_ordinary_spread_pass(self):
        assert judged(advantage_explodes, self.found(0.3), run=DIVIDED) is PASS

    def test_small_differences_between_different_completions_are_a_choice(self):
        assert judged(advantage_explodes, self.found(1e-3, equal=False), run=DIVIDED) is PASS

    def test_without_division_it_stays_noise(self):
        assert judged(advantage_explodes, self.found(1e-3)) is PASS


def with_prompts(found, last):
    """Return a record whose prompts have three tokens and the last of those given."""
    ids = np.tile([5, 6, 7], (ROWS, 1))
    ids[:, -1] = last
    offsets = np.arange(ROWS + 1) * 3
    return replace(without_ends(found), prompt_ids=ids.reshape(-1), prompt_offsets=offsets)


def without_ends(found):
    """Return a record with no end token in its completions."""
    return replace(found, token_ids=np.where(found.token_ids == 1, 2, found.token_ids))


def test_prompts_that_are_over_are_a_stop_token_fault():
    found = record()
    ended = np.where(np.arange(ROWS) < ROWS // 2, 1, 7)
    assert judged(stop_token_fault, with_prompts(found, 1)) is FAIL
    assert judged(stop_token_fault, with_prompts(found, 7)) is not FAIL
    assert judged(stop_token_fault, with_prompts(found, ended)) is not FAIL


def test_a_prompt_of_the_one_token_that_starts_a_text_is_not_over():
    found = without_ends(record())
    empty = replace(found, prompt_ids=np.ones(ROWS, int), prompt_offsets=np.arange(ROWS + 1))
    assert judged(stop_token_fault, empty) is not FAIL


class TestTruncation:
    def found(self, step, cut, paid):
        """Return a step with a fraction of truncated completions, and their extra reward."""
        found = record(step=step)
        is_cut = np.arange(ROWS) < round(cut * ROWS)
        reward = np.where(is_cut, 0.5 + paid, 0.5)
        return replace(
            found, reward=reward, finish_reason=np.where(is_cut, "length", "stop").astype("<U6")
        )

    def verdict(self, first, paid):
        last = [self.found(step, 0.9, paid) for step in (8, 9)]
        start = self.found(1, first, 0.0)
        return judged(context_truncated, last[-1], earlier=last[:-1], start=start)

    def test_from_the_start_it_is_a_fault_unless_it_pays(self):
        assert (self.verdict(0.9, 0.3), self.verdict(0.9, -0.3)) == (WARN, FAIL)

    def test_completions_that_grow_because_it_pays_are_learning(self):
        assert (self.verdict(0.7, 0.3), self.verdict(0.7, -0.3)) == (PASS, FAIL)


class TestSolvedTasks:
    def verdict(self, level, first):
        records = [replace(record(step=s), reward=np.full(ROWS, level)) for s in (7, 8, 9)]
        start = replace(record(), reward=np.resize([0.0, first], ROWS))
        return judged(equal_rewards, records[-1], earlier=records[:-1], start=start)

    def test_equal_at_the_highest_reward_is_a_task_that_is_solved(self):
        assert self.verdict(1.0, 1.0) is WARN

    def test_equal_at_a_lower_one_is_a_fault(self):
        assert self.verdict(0.0, 1.0) is FAIL
        assert self.verdict(0.6, 1.0) is FAIL


class TestSchedules:
    def steps(self, rates, norm=1.0):
        facts = [
            {
                **record().facts,
                "learning_rate": rate,
                "grad_norm": norm,
                "weights_published": f"w{n}",
            }
            for n, rate in enumerate(rates)
        ]
        return [replace(record(step=n + 1), facts=facts[n]) for n in range(len(rates))]

    def verdict(self, rates, **run):
        steps = self.steps(rates)
        return judged(policy_does_not_move, steps[-1], earlier=steps[:-1], run=run)

    def test_a_rate_of_0_in_three_steps_is_a_fault(self):
        assert self.verdict([1e-3, 0.0, 0.0, 0.0]) is FAIL

    def test_a_warm_up_may_begin_and_a_schedule_end_with_0(self):
        assert self.verdict([0.0, 1e-5, 2e-5]) is not FAIL
        assert self.verdict([1e-3, 0.0, 0.0, 0.0], max_steps=4) is not FAIL

    def test_a_warm_up_that_is_as_long_as_the_run_never_ends(self):
        assert self.verdict([1e-6, 2e-6], max_steps=30, warmup_steps=30) is FAIL
        assert self.verdict([1e-6, 2e-6], max_steps=30, warmup_steps=3) is not FAIL
