"""Causes in rows, rewards and the course of a run."""

from dataclasses import replace

import numpy as np
import pytest

from checks.exact_records import GROUP, LENGTH, ROWS, VOCABULARY, case, judged, moved, record
from evidence.records import full_record
from klinic.checks import (
    Verdict,
    broken_reward,
    broken_sampler,
    cliff_rewards,
    context_truncated,
    equal_rewards,
    kl_tail_dominates,
    malformed_output,
    nan_outside_mask,
    policy_does_not_move,
    prompt_mismatch,
    random_weights,
    ratio_not_applied,
    retokenised,
    reward_hacking,
    step_too_big,
    wrong_metric,
)
from klinic.doctor.diagnosis import diagnose
from klinic.evidence.metrics import step_metrics

PASS, FAIL, WARN, NO_DATA = Verdict.PASS, Verdict.FAIL, Verdict.WARN, Verdict.NO_DATA
FIRST = record()


def steps(num, **columns):
    return [replace(record(n), step=n, **columns) for n in range(1, num + 1)]


def test_a_gap_on_rows_that_do_not_survive_is_retokenisation():
    lost = np.arange(ROWS) % 3 == 0
    gap = np.where(np.repeat(lost, LENGTH), 1.0, 0.0)
    found = replace(FIRST, round_trip=~lost, logp_sampler=FIRST.logp_old - gap)
    assert judged(retokenised, found) is FAIL
    assert judged(retokenised, replace(found, logp_sampler=FIRST.logp_old)) is PASS
    assert judged(retokenised, replace(found, logp_sampler=FIRST.logp_old - 1.0)) is PASS
    assert judged(retokenised, FIRST) is PASS


def with_facts(record, **facts):
    return replace(record, facts={**record.facts, **facts})


def test_rows_with_other_ids_than_were_sampled_are_retokenised_without_any_gap():
    changed = with_facts(FIRST, num_changed_rows=9, num_reencoded_rows=1)
    bare = replace(changed, logp_sampler=None, logp_old=None, round_trip=None)
    assert judged(retokenised, changed) is FAIL
    assert judged(retokenised, bare) is FAIL
    assert judged(retokenised, with_facts(bare, num_reencoded_rows=0)) is NO_DATA
    same = with_facts(bare, num_changed_rows=0, num_reencoded_rows=0)
    assert judged(retokenised, same) is PASS
    unknown = with_facts(bare, num_changed_rows=0, num_reencoded_rows=None)
    assert judged(retokenised, unknown) is NO_DATA


def test_one_changed_row_of_more_than_a_hundred_is_no_retokenisation():
    rows = replace(full_record(lengths=(3,) * 101), round_trip=np.ones(101, bool))
    found = with_facts(rows, num_changed_rows=1, num_reencoded_rows=1)
    assert judged(retokenised, found) is PASS
    assert judged(retokenised, with_facts(found, num_reencoded_rows=2)) is FAIL


def test_one_prompt_that_differs_is_enough():
    match = np.ones(ROWS, bool)
    match[3] = False
    assert judged(prompt_mismatch, replace(FIRST, prompt_ids_match=match)) is FAIL
    other = ~np.repeat(match, LENGTH)
    gap = np.where(other, 0.3, 0.0)
    apart = replace(FIRST, prompt_ids_match=match, logp_sampler=FIRST.logp_old + gap)
    assert judged(prompt_mismatch, apart) is FAIL
    assert judged(prompt_mismatch, FIRST) is PASS


def test_prompts_that_end_elsewhere_before_the_same_tokens_are_no_mismatch():
    """The ids are those that were sampled: only the boundary of the completion has moved."""
    nowhere = np.zeros(ROWS, bool)
    assert judged(prompt_mismatch, replace(FIRST, prompt_ids_match=nowhere)) is PASS
    copied = replace(FIRST, prompt_ids_match=nowhere, logp=FIRST.logp_old - 0.1)
    assert judged(prompt_mismatch, copied) is FAIL  # the old log-probs are the sampler's own
    unknown = replace(FIRST, prompt_ids_match=nowhere, logp_sampler=None)
    assert judged(prompt_mismatch, unknown) is FAIL


def test_completions_that_no_working_sampler_draws():
    rows = FIRST.token_ids.reshape(ROWS, LENGTH)
    same = np.repeat(rows[::GROUP], GROUP, axis=0).reshape(-1)
    assert judged(broken_sampler, replace(FIRST, token_ids=same)) is FAIL
    outside = FIRST.token_ids.copy()
    outside[7] = VOCABULARY
    assert judged(broken_sampler, replace(FIRST, token_ids=outside)) is FAIL
    lost = FIRST.logp_sampler.copy()
    lost[7] = np.nan
    assert judged(broken_sampler, replace(FIRST, logp_sampler=lost)) is FAIL
    assert judged(broken_sampler, FIRST) is PASS


def test_equal_short_answers_are_likely_and_no_fault():
    found = replace(
        FIRST,
        token_ids=np.tile([5, 6, 7, 8, 9, 5, 6, 7, 8, 9], ROWS),
        logp_old=np.full(FIRST.num_tokens, -0.01),
    )
    assert judged(broken_sampler, found) is PASS


def test_a_loss_that_is_not_a_number_over_tokens_that_are():
    bad = {**FIRST.facts, "loss": np.nan, "grad_norm": np.nan}
    assert judged(nan_outside_mask, replace(FIRST, facts=bad)) is FAIL
    assert judged(nan_outside_mask, FIRST) is PASS
    logp = FIRST.logp_old.copy()
    logp[0] = np.nan
    inside = replace(FIRST, facts=bad, logp_old=logp, logp=logp)
    assert judged(nan_outside_mask, inside) is PASS
    mask = FIRST.loss_mask.copy()
    mask[0] = False
    assert judged(nan_outside_mask, replace(inside, loss_mask=mask)) is FAIL


def test_a_reward_that_is_not_a_number_is_where_it_starts_unless_its_row_is_not_trained_on():
    bad = {**FIRST.facts, "loss": np.nan, "grad_norm": np.nan}
    reward = FIRST.reward.copy()
    reward[0] = np.nan
    graded = replace(FIRST, facts=bad, reward=reward)
    assert judged(nan_outside_mask, graded) is PASS
    mask = FIRST.loss_mask.copy()
    mask[: FIRST.row_offsets[1]] = False
    assert judged(nan_outside_mask, replace(graded, loss_mask=mask)) is FAIL


def test_a_few_tokens_that_the_reference_loves_are_a_tail_and_a_drift_is_not():
    ref = FIRST.logp_old.copy()
    ref[3] += 12
    one = replace(FIRST, logp_ref=ref)
    assert judged(kl_tail_dominates, one, run={"estimator": "k3"}) is FAIL
    assert judged(kl_tail_dominates, one) is WARN
    drift = replace(moved(record(1), 1.0), logp_ref=record(1).logp_ref)
    assert judged(kl_tail_dominates, drift, run={"estimator": "k3"}) is PASS
    assert judged(kl_tail_dominates, FIRST, run={"estimator": "k3"}) is PASS


def test_nobody_who_differs_for_three_steps():
    same = steps(3, reward=np.zeros(ROWS))
    assert judged(equal_rewards, same[-1], earlier=same[:-1]) is FAIL
    assert judged(equal_rewards, same[-1], earlier=same[:1]) is NO_DATA
    well = steps(3)
    assert judged(equal_rewards, well[-1], earlier=well[:-1]) is PASS
    once = [well[0], same[1], well[2]]
    assert judged(equal_rewards, once[-1], earlier=once[:-1]) is PASS


def pairs(reward):
    rows = FIRST.token_ids.reshape(ROWS, LENGTH)
    same = np.repeat(rows[::GROUP], GROUP, axis=0).reshape(-1)
    return replace(FIRST, token_ids=same, reward=reward)


def graded(rewards_of, num=6):
    """Return the last of several steps with pairs of equal completions, and the steps before."""
    records = [replace(pairs(rewards_of(n)), step=n, token_ids=pair_ids(n)) for n in range(1, num)]
    return records[-1], records[:-1]


def pair_ids(seed):
    """Return completions of which two and two are equal in every group."""
    return np.repeat(record(seed).token_ids.reshape(ROWS, LENGTH)[::2], 2, axis=0).reshape(-1)


def test_equal_completions_with_different_rewards_are_graded_by_nobody():
    random = np.random.default_rng(0)
    last, earlier = graded(lambda _: random.random(ROWS))
    assert judged(broken_reward, last, earlier=earlier) is FAIL
    assert judged(broken_reward, last) is PASS  # one step alone is chance
    last, earlier = graded(lambda _: np.repeat(random.random(ROWS // 2), 2))
    assert judged(broken_reward, last, earlier=earlier) is PASS


def test_timeouts_that_count_as_wrong_are_noise_and_a_noisy_judge_is_none():
    random = np.random.default_rng(1)

    def right(_, share=0.9):
        return np.repeat(random.random(ROWS // 2) < share, 2).astype(float)

    last, earlier = graded(lambda n: right(n) * (random.random(ROWS) > 0.35), num=20)
    finding = broken_reward.CHECK(case(last, earlier=earlier))
    assert finding.verdict is FAIL
    assert "equal completions" in finding.summary
    for noisy in (
        lambda n: right(n) + 0.1 * random.normal(size=ROWS),
        lambda n: np.abs(right(n) - (random.random(ROWS) < 0.05)),
        lambda n: np.abs(right(n, 0.99) - (random.random(ROWS) < 0.05)),  # mostly noise, and rare
    ):
        last, earlier = graded(noisy, num=20)
        assert judged(broken_reward, last, earlier=earlier) is PASS


def test_a_generation_that_is_recorded_twice_counts_once():
    random = np.random.default_rng(3)
    last, earlier = graded(lambda _: random.random(ROWS), num=3)
    once = broken_reward.CHECK(case(last, earlier=earlier))
    again = broken_reward.CHECK(case(last, earlier=[*earlier, *earlier, last, last]))
    assert once.measured == again.measured


def test_one_infinite_reward_is_enough_wherever_it_is():
    low = np.where(np.arange(ROWS) == 3, -np.inf, 0.5)
    assert judged(broken_reward, replace(FIRST, reward=low)) is FAIL
    good = {"regrade": {"same": 1.0, "right_answers": 1.0, "wrong_completions": 0.2}}
    assert judged(broken_reward, FIRST, answers=good) is PASS
    part = replace(FIRST, reward_parts={"log": low})
    assert judged(broken_reward, part, answers=good) is FAIL
    told = {FIRST.step: {"reward": "-Infinity"}}
    assert judged(broken_reward, FIRST, answers=good, metrics=told) is FAIL
    lost = replace(FIRST, reward=np.where(np.arange(ROWS) == 3, np.nan, 0.5))
    assert judged(broken_reward, lost, answers=good) is PASS


def test_a_reward_that_only_the_prompt_decides():
    random = np.random.default_rng(2)

    def by_prompt(_):
        return np.repeat(random.random(ROWS // GROUP) < 0.4, GROUP).astype(float)

    last, earlier = graded(by_prompt, num=12)
    finding = broken_reward.CHECK(case(last, earlier=earlier))
    assert finding.verdict is FAIL
    assert "prompt alone" in finding.summary
    assert judged(broken_reward, last, earlier=earlier[-3:]) is PASS  # too few prompts
    solved, before = graded(lambda _: np.ones(ROWS), num=12)
    assert judged(broken_reward, solved, earlier=before) is PASS
    mixed = replace(earlier[-1], reward=np.repeat(np.arange(ROWS // 2) % 2, 2).astype(float))
    assert judged(broken_reward, last, earlier=[*earlier[:-1], mixed]) is PASS


def paid(prompts, more, less):
    facts = {"answer_prompts": prompts, "answer_paid_more": more, "answer_paid_less": less}
    return replace(FIRST, facts={**FIRST.facts, **facts})


def test_right_answers_that_are_never_paid_more():
    assert judged(broken_reward, paid(16, 0, 0), earlier=[paid(16, 0, 0)]) is FAIL
    assert judged(broken_reward, paid(16, 0, 16), earlier=[paid(16, 0, 16)]) is FAIL
    assert judged(broken_reward, paid(16, 1, 0), earlier=[paid(16, 0, 0)]) is PASS
    assert judged(broken_reward, paid(15, 0, 0), earlier=[paid(16, 0, 0)]) is NO_DATA


def with_empty_rows(number, *, paid, others):
    """Every second completion ends at once; the others get the highest reward in `others`."""
    found = record(seed=number, step=number)
    lengths = np.where(np.arange(ROWS) % 2, LENGTH, 1)
    kept = (np.arange(LENGTH) < lengths[:, None]).ravel()
    ids = np.where(found.token_ids == 1, 2, found.token_ids).reshape(ROWS, -1)
    ids[::2, 0] = 1
    is_paid = np.random.default_rng(number).random(ROWS) < others
    reward = np.where(np.arange(ROWS) % 2, is_paid, paid).astype(float)
    columns = {"loss_mask", "emitted_by", "logp", "logp_old", "logp_ref", "logp_sampler"}
    columns |= {"entropy", "weight_version"}
    return replace(
        found,
        row_offsets=np.concatenate([[0], np.cumsum(lengths)]),
        token_ids=ids.ravel()[kept],
        reward=reward,
        **{name: getattr(found, name)[kept] for name in columns},
    )


@pytest.mark.parametrize(
    ("paid", "others", "is_wrong"), [(1.0, 0.3, True), (0.0, 0.3, False), (1.0, 0.8, False)]
)
def test_an_empty_answer_that_counts_as_right(paid, others, is_wrong):
    *earlier, now = [with_empty_rows(n, paid=paid, others=others) for n in (1, 2, 3)]
    finding = broken_reward.CHECK(case(now, earlier=earlier))
    assert ("without a token" in finding.summary) is is_wrong
    assert (finding.verdict is FAIL) is is_wrong


def test_missing_rewards_and_those_that_are_others_when_asked_again():
    half = np.where(np.arange(ROWS) % 2, np.nan, 1.0)
    assert judged(broken_reward, replace(FIRST, reward=half)) is FAIL
    good = {"same": 1.0, "right_answers": 1.0, "wrong_completions": 0.2}
    assert judged(broken_reward, FIRST, answers={"regrade": good}) is PASS
    for wrong in ({"same": 0.3}, {"right_answers": 0.1}):
        assert judged(broken_reward, FIRST, answers={"regrade": good | wrong}) is FAIL
    later = moved(record(1), 0.0)
    exploited = {"regrade": good | {"right_answers": 0.1}}
    assert judged(broken_reward, later, answers=exploited) is PASS
    assert judged(broken_reward, FIRST) is NO_DATA


def test_all_or_nothing_with_a_punishment_for_almost_everybody():
    few = np.where(np.arange(ROWS) == 0, 1.0, -1.0)
    steep = steps(3, reward=few)
    assert judged(cliff_rewards, steep[-1], earlier=steep[:-1]) is FAIL
    mild = steps(3, reward=np.maximum(few, 0.0))
    assert judged(cliff_rewards, mild[-1], earlier=mild[:-1]) is PASS
    graded = steps(3)
    assert judged(cliff_rewards, graded[-1], earlier=graded[:-1]) is PASS


def test_answers_that_cannot_be_read():
    def told(rate):
        return {n: {"completions/parse_rate": rate} for n in (1, 2, 3)}

    assert judged(malformed_output, FIRST, metrics=told(0.05)) is FAIL
    assert judged(malformed_output, FIRST, metrics=told(0.6)) is PASS


def test_completions_that_are_cut_off_from_the_start_and_such_as_grew():
    cut = np.array(["length"] * ROWS, "<U6")
    ids = np.where(FIRST.token_ids == 1, 2, FIRST.token_ids)
    two = steps(2, finish_reason=cut, token_ids=ids, reward=np.zeros(ROWS))
    assert judged(context_truncated, two[1], earlier=two[:1], start=two[0]) is FAIL
    assert judged(context_truncated, two[1], earlier=two[:1], start=FIRST) is PASS
    assert judged(context_truncated, FIRST, earlier=[FIRST], start=FIRST) is PASS


def test_a_policy_without_preferences_has_random_weights():
    even = np.full(FIRST.num_tokens, 0.95 * np.log(VOCABULARY))
    assert judged(random_weights, replace(FIRST, entropy=even)) is FAIL
    assert judged(random_weights, replace(FIRST, entropy=even / 2)) is PASS
    later = replace(FIRST, entropy=even, facts={"learner_version": 3})
    assert judged(random_weights, later) is NO_DATA


FIRST_STEP = replace(FIRST, reward=(np.arange(ROWS) % 10 < 3).astype(float))


def ran_away(reward):
    later = moved(record(1), 0.0)
    return replace(later, logp_old=later.logp_old + 1.0, reward=np.full(ROWS, reward))


def test_a_policy_that_runs_away_and_earns_less_stepped_too_far():
    assert judged(step_too_big, ran_away(-1.0), start=FIRST) is FAIL
    assert judged(step_too_big, ran_away(2.0), start=FIRST) is PASS
    near = replace(moved(record(1), 0.01), reward=np.full(ROWS, -1.0))
    assert judged(step_too_big, near, start=FIRST) is PASS


def test_a_policy_that_goes_far_and_gains_nothing_stepped_too_far():
    def judged_at(k1, change):
        """Return the verdict on three steps at a KL whose rewards changed by less than 4 errors."""
        steps = [replace(ran_away(0.0), step=n, reward=FIRST.reward + change) for n in (2, 3, 4)]
        far = [replace(r, logp_old=r.logp_ref + k1) for r in steps]
        return judged(step_too_big, far[-1], earlier=far[:-1], start=FIRST)

    assert judged_at(1.5, -0.3) is FAIL
    assert judged_at(1.0, -0.3) is PASS  # 1.0 is not above
    assert judged_at(1.5, 1.0) is PASS
    assert judged_at(1.5, 0.0) is PASS  # 6 groups a step: a gain may be hidden by chance


def test_a_slow_gain_far_from_the_reference_is_learning_and_a_late_fall_is_not():
    random = np.random.default_rng(4)
    course = [
        replace(
            moved(record(n), 0.0),
            step=n,
            logp_old=record(n).logp_ref + min(0.1 * n, 2.0),
            reward=(random.random(ROWS) < 0.3 + 0.01 * n).astype(float),
        )
        for n in range(2, 22)
    ]
    for end in range(1, len(course)):
        verdict = judged(step_too_big, course[end], earlier=course[:end], start=FIRST_STEP)
        assert verdict is PASS
    fallen = [replace(course[-1], step=n, reward=np.zeros(ROWS)) for n in (22, 23, 24)]
    assert (
        judged(step_too_big, fallen[-1], earlier=[*course, *fallen[:2]], start=FIRST_STEP) is FAIL
    )


def test_weights_that_stay_where_they_were():
    stuck = replace(record(2), step=2)
    told = {1: {"discarded": 0.0}, 2: {}}
    assert judged(policy_does_not_move, stuck, earlier=[FIRST], metrics=told) is FAIL
    thrown = {1: {"discarded": 1.0}, 2: {}}
    assert judged(policy_does_not_move, stuck, earlier=[FIRST], metrics=thrown) is NO_DATA
    went = replace(stuck, facts={**stuck.facts, "weights_published": "w1"})
    assert judged(policy_does_not_move, went, earlier=[FIRST], metrics=told) is PASS
    cut = replace(FIRST, facts={**FIRST.facts, "grad_norm": 0.0})
    assert judged(policy_does_not_move, cut) is FAIL
    warming = {1: {"reward_scale": 0.0}}
    assert judged(policy_does_not_move, cut, metrics=warming) is NO_DATA
    rounded = replace(FIRST, facts={**FIRST.facts, "unchanged_share": 0.99})
    warming_up = replace(rounded, facts={**rounded.facts, "learning_rate": 0.0})
    assert judged(policy_does_not_move, warming_up) is not FAIL
    assert judged(policy_does_not_move, rounded) is FAIL
    nothing = replace(cut, advantage=np.zeros(ROWS))
    assert judged(policy_does_not_move, nothing) is NO_DATA


def test_a_policy_that_is_where_it_started_after_many_updates():
    def at(step, distance):
        facts = {**FIRST.facts, "learner_version": step - 1, "weights_published": f"w{step}"}
        return replace(moved(record(step), distance), step=step, facts=facts)

    def verdict(distance, *, last=10, **columns):
        window = [at(step, 0.0) for step in range(1, last)]
        return judged(
            policy_does_not_move,
            replace(at(last, distance), **columns),
            earlier=window,
            start=window[0],
        )

    assert verdict(1e-6) is FAIL
    assert verdict(1e-6, advantage=np.zeros(ROWS)) is FAIL  # an equal group hides nothing
    assert verdict(1e-3) is PASS
    assert verdict(1e-6, last=5) is PASS  # the first steps of a warm-up
    other = {**at(10, 0.0).facts, "reference_fingerprint": "moved"}
    assert verdict(0.0, facts=other) is PASS


def test_later_updates_on_a_generation_whose_ratio_is_1():
    lag = {"sampler": {"max_version_lag": 3}}

    def update(size, **columns):
        """Return a second update on the completions of the first, by a policy that has moved."""
        later = moved(FIRST, size)
        old = {"logp_old": FIRST.logp, "weight_version": FIRST.weight_version}
        return replace(later, **{**old, **columns})

    def verdict(found, earlier=(FIRST,)):
        return judged(ratio_not_applied, found, earlier=earlier, run=lag)

    dropped = update(0.2)
    assert verdict(replace(dropped, logp_old=dropped.logp)) is FAIL
    assert verdict(dropped) is PASS
    still = update(1e-5)
    assert verdict(replace(still, logp_old=still.logp)) is NO_DATA
    # a new generation that says the same
    again = replace(dropped, logp_old=dropped.logp, weight_version=FIRST.weight_version + 3)
    assert verdict(again) is NO_DATA
    assert verdict(record(1)) is NO_DATA
    assert judged(ratio_not_applied, record(1), earlier=[FIRST]) is PASS


def course(rewards, accuracies):
    lines = {n + 1: {"reward": r} for n, r in enumerate(rewards)}
    for place, accuracy in zip((0, len(rewards)), accuracies, strict=bool(accuracies)):
        lines.setdefault(place, {})["eval/accuracy"] = accuracy
    return lines


def test_a_reward_that_rises_without_the_skill():
    rising = list(np.linspace(0, 1, 20))
    assert judged(reward_hacking, FIRST, metrics=course(rising, (0.8, 0.3))) is FAIL
    assert judged(reward_hacking, FIRST, metrics=course(rising, (0.3, 0.8))) is PASS
    assert judged(reward_hacking, FIRST, metrics=course([0.5] * 20, (0.8, 0.3))) is PASS
    assert judged(reward_hacking, FIRST, metrics=course(rising[:4], (0.8, 0.3))) is NO_DATA
    # nobody measured accuracy: a reward that did not rise is enough to rule it out
    assert judged(reward_hacking, FIRST, metrics=course([0.5] * 20, ())) is PASS
    assert judged(reward_hacking, FIRST, metrics=course(rising, ())) is NO_DATA
    assert judged(reward_hacking, FIRST, metrics=course(rising[:4], ())) is NO_DATA
    assert judged(reward_hacking, FIRST, metrics=course([0.5, 0.6, 0.5, 0.6], ())) is PASS
    assert judged(reward_hacking, FIRST, metrics=course([0.5, 0.6, 0.1], ())) is NO_DATA


def test_a_smaller_rise_is_enough_where_most_of_the_skill_is_gone():
    restless = np.array([0.4, 0.6, 0.4, 0.6, 0.5])
    rewards = [*restless, *(restless + 0.18)]  # 2.8 standard errors
    assert judged(reward_hacking, FIRST, metrics=course(rewards, (0.8, 0.3))) is FAIL
    assert judged(reward_hacking, FIRST, metrics=course(rewards, (0.8, 0.5))) is PASS
    assert judged(reward_hacking, FIRST, metrics=course(rewards[::-1], (0.8, 0.3))) is PASS
    assert judged(reward_hacking, FIRST, metrics=course(rewards, ())) is NO_DATA


def test_a_policy_that_ran_away_and_is_paid_for_it_in_the_end_hacks_its_reward():
    """The reward rose, accuracy fell, and on the way the policy was far off for less."""
    far = moved(record(1), 0.0)
    far = replace(far, logp_ref=far.logp_old - 2.0, reward=far.reward - 0.3)
    window = [replace(far, step=step) for step in (2, 3, 4)]
    later = case(
        far, start=FIRST, earlier=window, metrics=course(np.linspace(0, 1, 20), (0.8, 0.3))
    )
    found = diagnose([later], [step_too_big.CHECK, reward_hacking.CHECK])
    assert step_too_big.CHECK(later).verdict is FAIL
    assert found.cause == "reward-hacking"
    fell = replace(far, reward=np.zeros_like(far.reward))
    assert step_too_big.CHECK(case(fell, start=FIRST)).excludes == ("reward-hacking",)


def test_a_figure_that_the_record_does_not_bear_out():
    found = moved(record(1), 0.3)
    right = step_metrics(found) | {"grad_norm": 1.0}
    assert judged(wrong_metric, found, metrics={4: right}) is PASS
    for name, factor in (("kl", 0.8), ("kl", 1.2), ("entropy", 1.5), ("grad_norm", 0.1)):
        wrong = right | {name: factor * right[name]}
        assert judged(wrong_metric, found, metrics={4: wrong}) is FAIL
        sample = replace(found, facts={**found.facts, "step_rows": 2 * found.num_rows})
        assert judged(wrong_metric, sample, metrics={4: wrong}) is NO_DATA
