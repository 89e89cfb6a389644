"""The checks of a run with a teacher: each fires on its fault, and on nothing healthy."""

from dataclasses import replace

import numpy as np
import pytest

from checks.exact_records import LENGTH, ROWS, VOCABULARY, case, distributions, judged, record
from klinic.checks import (
    equal_rewards,
    stale_teacher_prompts,
    swapped_teacher,
    teacher_as_reference,
    teacher_gradient_wrong,
    wrong_tokenizer,
)
from klinic.evidence.verdict import Verdict

TEACHER = {"kind": "copy", "source": "big", "digest": "t", "estimator": "exact", "alone": False}
RUN = {"teacher": TEACHER, "reference": {"kind": "copy", "source": "start", "digest": "r"}}


def taught(seed=0, *, offset=0, by=None, **changes):
    """Return a record whose teacher is the policy with some noise, `offset` ids away."""
    made = record(seed, **changes)
    random = np.random.default_rng(seed + 7)
    rows = distributions(seed) if by is None else by
    read = (made.token_ids + offset) % VOCABULARY
    logp = rows[np.arange(ROWS * LENGTH), read] + 0.1 * random.normal(size=ROWS * LENGTH)
    return replace(made, logp_teacher=logp, facts={**made.facts, "teacher_fingerprint": "t"})


def sharp(seed=0):
    """Return distributions of a teacher and a policy that have learned the task."""
    rows = 3 * distributions(seed)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


def sure(offset, **changes):
    """Return completions drawn from sharp distributions, and scored by a teacher `offset` away."""
    rows = sharp()
    made = record(drawn_from=rows, **changes)
    picked = np.arange(len(made.token_ids))
    read = (made.token_ids + offset) % VOCABULARY
    return replace(made, logp_old=rows[picked, made.token_ids], logp_teacher=rows[picked, read])


def test_a_teacher_of_the_same_tokens_is_well():
    assert judged(wrong_tokenizer, sure(0), run=RUN) is Verdict.PASS


def test_a_teacher_that_reads_other_tokens_is_named():
    assert judged(wrong_tokenizer, sure(5), run=RUN) is Verdict.FAIL


def test_without_rewards_that_differ_other_tokens_are_a_warning():
    equal = sure(5, reward=np.ones(ROWS))
    assert judged(wrong_tokenizer, equal, run=RUN) is Verdict.WARN
    assert judged(wrong_tokenizer, replace(equal, reward=None), run=RUN) is Verdict.WARN


def test_a_teacher_that_likes_the_best_completions_is_another_model_not_another_tokenizer():
    found = sure(5)
    best = np.repeat(found.reward == found.reward.max(), LENGTH)
    liked = np.where(best, found.logp_old, found.logp_teacher)
    assert judged(wrong_tokenizer, replace(found, logp_teacher=liked), run=RUN) is Verdict.PASS


def test_an_unsure_policy_proves_nothing_about_a_teacher():
    found = sure(5)
    flat = np.full(found.num_tokens, -np.log(VOCABULARY))
    assert judged(wrong_tokenizer, replace(found, logp_old=flat), run=RUN) is Verdict.NO_DATA


def test_an_untrained_teacher_is_not_one_with_another_tokenizer():
    found = sure(0)
    flat = np.full(found.num_tokens, -np.log(VOCABULARY) - 0.3)
    assert judged(wrong_tokenizer, replace(found, logp_teacher=flat), run=RUN) is Verdict.PASS


def test_a_teacher_with_another_fingerprint_is_swapped():
    start, later = taught(step=1), taught(1, step=2, version=1)
    other = replace(later, facts={**later.facts, "teacher_fingerprint": "u"})
    assert judged(swapped_teacher, later, start=start, run=RUN) is Verdict.PASS
    assert judged(swapped_teacher, other, start=start, run=RUN) is Verdict.FAIL
    assert judged(swapped_teacher, start, start=start, run=RUN) is Verdict.NO_DATA


@pytest.mark.parametrize(("size", "verdict"), [(0.0, Verdict.PASS), (0.2, Verdict.FAIL)])
def test_without_a_fingerprint_repeated_completions_show_a_swapped_teacher(size, verdict):
    prompts = {"prompt_ids": np.arange(ROWS), "prompt_offsets": np.arange(ROWS + 1)}
    start = replace(taught(step=1, **prompts), facts={})
    noise = size * np.random.default_rng(3).normal(size=start.num_tokens)
    later = replace(start, step=2, logp_teacher=start.logp_teacher + noise)
    assert judged(swapped_teacher, later, start=start, run=RUN) is verdict


def test_one_model_in_both_places_is_named():
    found = taught()
    same = replace(found, logp_teacher=found.logp_ref)
    assert judged(teacher_as_reference, found, run=RUN) is Verdict.PASS
    assert judged(teacher_as_reference, same, run=RUN) is Verdict.FAIL
    one_model = {**RUN, "teacher": {**TEACHER, "digest": "r"}}
    assert judged(teacher_as_reference, same, run=one_model) is Verdict.PASS


@pytest.mark.parametrize(
    ("ratio", "cosine", "verdict"),
    [
        (1.0, 1.0, Verdict.PASS),
        (1.01, 0.9999, Verdict.PASS),
        (0.8, 1.0, Verdict.FAIL),
        (1.0, 0.95, Verdict.FAIL),
        (None, None, Verdict.NO_DATA),
    ],
)
def test_the_gradient_to_a_teacher_is_compared_with_its_formula(ratio, cosine, verdict):
    answers = {"teacher_gradient": {"ratio": ratio, "cosine": cosine}}
    assert judged(teacher_gradient_wrong, taught(), run=RUN, answers=answers) is verdict


@pytest.mark.parametrize(("mean", "verdict"), [(0.001, Verdict.PASS), (0.5, Verdict.FAIL)])
def test_a_teacher_that_does_not_repeat_itself_read_other_prompts(mean, verdict):
    answers = {"teacher_rescore": {"mean": mean, "largest": 3 * mean}}
    assert judged(stale_teacher_prompts, taught(), run=RUN, answers=answers) is verdict


def test_equal_rewards_are_no_cause_where_a_teacher_replaces_them():
    found = record(reward=np.zeros(ROWS))
    alone = {**RUN, "teacher": {**TEACHER, "alone": True}}
    earlier = [record(s, reward=np.zeros(ROWS), step=s) for s in range(1, 12)]
    sick = equal_rewards.CHECK(case(found, earlier=earlier, run=RUN))
    assert sick.verdict is Verdict.FAIL
    assert equal_rewards.CHECK(case(found, earlier=earlier, run=alone)).verdict is Verdict.PASS
