"""Causes of several processes, advantages per token, an entropy bonus, lost and left state."""

from dataclasses import replace

import numpy as np
import pytest

from checks import exact_records
from klinic.checks import (
    CHECKS,
    Case,
    Verdict,
    entropy_term_wrong,
    gradient_not_cleared,
    loss_scaled_wrong,
    misplaced_advantage,
    ranks_diverge,
    state_lost,
)
from klinic.maths.arrays import row_of_token

RUN = exact_records.RUN


def record_of(step=1, **changes):
    record = exact_records.record(step=step, version=step - 1)
    facts = {**record.facts, **changes.pop("facts", {})}
    return replace(record, facts=facts, **changes)


def verdict(check, record, **evidence):
    return check.CHECK(Case(record=record, **{"run": RUN, **evidence})).verdict


def spread(record, by_row):
    return by_row[row_of_token(record.row_offsets)]


class TestMisplacedAdvantage:
    def advantages(self):
        record = record_of()
        by_row = np.linspace(-1, 1, record.num_rows) + 0.01
        return record, np.where(record.loss_mask, spread(record, by_row), 0.0)

    def test_one_advantage_at_all_trained_tokens_passes(self):
        record, advantage = self.advantages()
        record = replace(record, token_advantage=advantage)
        assert verdict(misplaced_advantage, record) is Verdict.PASS

    def test_advantages_at_the_last_tokens_alone_fail(self):
        record, advantage = self.advantages()
        starts = record.row_offsets[:-1]
        advantage[starts] = 0.0
        record = replace(record, token_advantage=advantage)
        assert verdict(misplaced_advantage, record) is Verdict.FAIL

    def test_advantages_of_the_neighbouring_token_fail(self):
        record, advantage = self.advantages()
        record = replace(record, token_advantage=np.roll(advantage, 1))
        assert verdict(misplaced_advantage, record) is Verdict.FAIL

    def test_other_values_are_a_choice_unless_the_estimator_has_one_a_row(self):
        record, advantage = self.advantages()
        record = replace(record, token_advantage=advantage * np.linspace(1, 2, len(advantage)))
        assert verdict(misplaced_advantage, record, run={"advantage": "gae"}) is Verdict.PASS
        named = {"advantage": "group_mean"}
        assert verdict(misplaced_advantage, record, run=named) is Verdict.FAIL

    @pytest.mark.parametrize(("zeros", "expected"), [("a turn", "pass"), ("half a turn", "fail")])
    def test_a_turn_as_good_as_its_baseline_has_no_advantage(self, zeros, expected):
        """Two turns of four tokens around a tool's two, each with an advantage of its own."""
        record, advantage = self.advantages()
        place = np.arange(record.num_tokens) % 10
        mask = (place < 4) | (place > 5)
        advantage = np.where(place > 5, 2, 1) * advantage * mask
        rows = row_of_token(record.row_offsets)
        emptied = (place > 5) if zeros == "a turn" else (place > 7)
        advantage = np.where((rows % 3 == 0) & emptied, 0.0, advantage)
        record = replace(record, loss_mask=mask, token_advantage=advantage)
        run = {**RUN, "advantage": None}
        assert verdict(misplaced_advantage, record, run=run) == expected

    def test_advantages_on_the_last_turn_alone_are_of_no_turn(self):
        record, advantage = self.advantages()
        place = np.arange(record.num_tokens) % 10
        mask = (place < 4) | (place > 5)
        record = replace(record, loss_mask=mask, token_advantage=advantage * (place > 5))
        run = {**RUN, "advantage": None}
        assert verdict(misplaced_advantage, record, run=run) is Verdict.FAIL

    def test_a_row_of_equal_rewards_has_no_advantage_anywhere(self):
        record, advantage = self.advantages()
        rows = row_of_token(record.row_offsets)
        record = replace(record, token_advantage=np.where(rows % 2 == 0, 0.0, advantage))
        assert verdict(misplaced_advantage, record) is Verdict.PASS


class TestRanksDiverge:
    def test_fingerprints_decide(self):
        process = np.arange(record_of().num_rows) % 2
        for num, wanted in ((1, Verdict.PASS), (2, Verdict.FAIL)):
            record = record_of(process=process, facts={"num_rank_weights": num})
            assert verdict(ranks_diverge, record) is wanted

    @pytest.mark.parametrize(("apart", "wanted"), [(0.0, Verdict.PASS), (0.05, Verdict.FAIL)])
    def test_a_sampler_that_agrees_with_one_process(self, apart, wanted):
        start = record_of(process=np.arange(record_of().num_rows) % 2)
        noise = np.random.default_rng(0).normal(size=start.num_tokens)
        start = replace(start, logp_sampler=start.logp_old + 1e-5 * noise)
        odd = spread(start, start.process) == 1
        now = replace(start, step=4, facts={**start.facts, "learner_version": 3})
        now = replace(now, logp_old=now.logp_old + np.where(odd, apart * noise, 0.0))
        assert verdict(ranks_diverge, now, start=start) is wanted


class TestLossDenominator:
    def judge(self, **changes):
        run = {**RUN, "loss": {"name": "dapo", "aggregation": "token_mean"}}
        return verdict(loss_scaled_wrong, record_of(**changes), run=run)

    def test_the_trained_tokens_of_the_step(self):
        record = record_of()
        num = float(record.loss_mask.sum())
        assert self.judge(facts={"loss_denominator": num}) is Verdict.NO_DATA  # and no probe
        assert self.judge(facts={"loss_denominator": num + 0.1 * num}) is Verdict.FAIL

    def test_every_process_its_own_tokens(self):
        record = record_of()
        process = (np.arange(record.num_rows) >= record.num_rows // 2).astype(int)
        num = float(record.loss_mask.sum())
        equal = np.full(record.num_rows, num)
        assert self.judge(process=process, loss_denominator=equal) is Verdict.NO_DATA
        own = np.where(process == 0, 1.2 * num, 0.8 * num)
        assert self.judge(process=process, loss_denominator=own) is Verdict.FAIL


class TestStateLost:
    def steps(self, distances, **settings):
        records = []
        for step, distance in enumerate(distances, start=1):
            record = record_of(step)
            noise = np.random.default_rng(0).normal(size=record.num_tokens)
            facts = {name: values[step - 1] for name, values in settings.items()}
            records.append(
                replace(
                    record,
                    logp_ref=record.logp_old + distance * noise,
                    facts={**record.facts, **facts},
                )
            )
        return records

    def judge(self, records):
        *earlier, now = records
        return verdict(state_lost, now, earlier=tuple(earlier), start=earlier[0])

    def test_weights_of_the_start(self):
        assert self.judge(self.steps([0, 0.02, 0.03, 0.04, 0.001])) is Verdict.FAIL
        assert self.judge(self.steps([0, 0.02, 0.03, 0.04, 0.03])) is Verdict.PASS

    @pytest.mark.parametrize("name", ["learning_rate", "kl_coef"])
    def test_a_setting_of_the_start(self, name):
        distances = [0, 0.02, 0.03, 0.04, 0.05, 0.06]
        lost = {name: [1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 1e-6]}
        kept = {name: [1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 5.5e-6]}
        cosine = {name: [1e-6, 1.3e-6, 1e-6, 0.7e-6, 1e-6, 1.3e-6]}
        assert self.judge(self.steps(distances, **lost)) is Verdict.FAIL
        assert self.judge(self.steps(distances, **kept)) is Verdict.PASS
        assert self.judge(self.steps(distances, **cosine)) is Verdict.PASS

    def test_a_reference_that_was_replaced_is_another_cause(self):
        records = self.steps([0, 0.02, 0.03, 0.04, 0.001])
        records = [
            replace(r, facts={**r.facts, "reference_fingerprint": "b" if r.step == 5 else "a"})
            for r in records
        ]
        assert self.judge(records) is Verdict.PASS


class TestEntropyBonus:
    def judge(self, entropies, *, coef=0.1, reward_gain=0.0):
        records = []
        for step, entropy in enumerate(entropies, start=1):
            record = record_of(step, facts={"entropy_coef": coef})
            changes = {"entropy": np.full(record.num_tokens, entropy)}
            if step > 1:
                changes["reward"] = record.reward + reward_gain
            records.append(replace(record, **changes))
        return verdict(
            entropy_term_wrong, records[-1], earlier=tuple(records[:-1]), start=records[0]
        )

    def test_a_rising_entropy_without_a_gain_fails(self):
        rising = [0.5, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6]
        assert self.judge(rising) is Verdict.FAIL
        assert self.judge(rising, coef=0.0) is Verdict.PASS
        # the recorded loss is no loss, so that the sign of the bonus is not known
        assert self.judge(rising, reward_gain=5.0) is Verdict.NO_DATA
        assert self.judge([0.5, 0.52, 0.5, 0.53, 0.51, 0.54, 0.52]) is Verdict.NO_DATA


class TestGradientNotCleared:
    def judge(self, norms, *, equal=lambda step: step % 2 == 0, **facts):
        records = []
        for step, norm in enumerate(norms, start=1):
            record = record_of(step)
            own = {"kl_coef": 0.0, "loss": 0.0 if equal(step) else 0.1, "grad_norm": norm, **facts}
            advantage = 0.0 * record.advantage if equal(step) else record.advantage
            records.append(
                replace(record, advantage=advantage, facts={**record.facts, **own}),
            )
        return verdict(gradient_not_cleared, records[-1], earlier=tuple(records[:-1]))

    def test_a_gradient_from_nothing_fails_in_the_second_step(self):
        assert self.judge([1.0, 1.0, 1.0, 0.9]) is Verdict.FAIL
        assert self.judge([1.0, 1.0]) is Verdict.NO_DATA

    def test_no_gradient_passes(self):
        assert self.judge([1.0, 0.0]) is Verdict.PASS
        assert self.judge([1.0, 1e-7, 1.0, 1e-7]) is Verdict.PASS

    def test_without_a_step_of_equal_rewards_nothing_is_known(self):
        assert self.judge([1.0, 1.0, 1.0], equal=lambda _: False) is Verdict.NO_DATA
        assert self.judge([1.0, 1.0, 1.0, 1.0, 1.0]) is Verdict.NO_DATA  # the last one has some

    @pytest.mark.parametrize(
        "facts", [{"kl_coef": 0.1}, {"kl_coef": None}, {"loss": 1e-9}, {"entropy_coef": 0.1}]
    )
    def test_another_term_explains_the_gradient(self, facts):
        assert self.judge([1.0, 1.0, 1.0, 1.0], **facts) is Verdict.NO_DATA

    def test_a_teacher_is_another_term(self):
        record = record_of(2, facts={"kl_coef": 0.0, "loss": 0.0})
        record = replace(record, advantage=0.0 * record.advantage)
        assert verdict(gradient_not_cleared, record, earlier=(record,)) is Verdict.FAIL
        taught = replace(record, logp_teacher=record.logp)
        assert verdict(gradient_not_cleared, taught, earlier=(taught,)) is Verdict.NO_DATA


def test_a_cause_of_a_setup_of_which_nothing_is_recorded_is_no_serious_rival():
    names = {check.name for check in CHECKS if check.is_of_setup}
    of_teachers = {"wrong-tokenizer", "swapped-teacher", "teacher-as-reference"}
    of_teachers |= {"teacher-gradient-wrong", "stale-teacher-prompts"}
    of_loops = {"misplaced-advantage", "ranks-diverge", "entropy-term-wrong"}
    assert names == of_teachers | of_loops | {"kl-controller-reversed"}
