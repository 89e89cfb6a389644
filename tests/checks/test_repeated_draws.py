"""Steps that draw the same random numbers are found by the places of their completions alone."""

from dataclasses import replace

import numpy as np
import pytest
from exact_records import RUN

from klinic.checks import broken_sampler
from klinic.checks.base import Case, Verdict
from klinic.checks.repeated_draws import find_repeated_draws
from klinic.evidence.record import StepRecord

PROMPTS, GROUP, WORDS = 6, 8, 40
ROWS = PROMPTS * GROUP


def generation(step, *, seed, moved=0.05, order=None, version=None):
    """Return completions of two tokens: a word that is drawn by inversion, and an end token."""
    policy = np.random.default_rng(0).normal(size=(PROMPTS, WORDS)) * 2
    policy = policy + step * moved * np.random.default_rng(1).normal(size=policy.shape)
    chances = np.exp(policy) / np.exp(policy).sum(1, keepdims=True)
    numbers = np.random.default_rng(seed).random((PROMPTS, GROUP))
    words = np.array(
        [np.searchsorted(np.cumsum(p), u) for p, u in zip(chances, numbers, strict=True)]
    )
    words = np.minimum(words, WORDS - 1)
    lengths = 1 + words % 3
    if order == "length":
        by_length = np.argsort(lengths, axis=1, kind="stable")
        words = np.take_along_axis(words, by_length, axis=1)
    ids = [[word] * (1 + word % 3) for word in words.ravel()]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids])])
    tokens = np.concatenate(ids)
    return StepRecord(
        step=step,
        row_offsets=offsets,
        group=np.repeat(np.arange(PROMPTS), GROUP),
        token_ids=tokens,
        loss_mask=np.ones(len(tokens), bool),
        prompt_ids=100 + np.repeat(np.arange(PROMPTS), GROUP),
        prompt_offsets=np.arange(ROWS + 1),
        logp=np.full(len(tokens), -0.5),
        logp_old=np.full(len(tokens), -0.5),
        reward=np.random.default_rng(step).random(ROWS),
        weight_version=np.full(len(tokens), step if version is None else version),
        facts={"learner_version": step},
    )


def case(records):
    return Case(record=records[-1], earlier=tuple(records[:-1]), run={**RUN, "vocabulary_size": 99})


def test_a_seed_that_is_set_in_every_step_is_found():
    found = case([generation(n, seed=3) for n in range(1, 7)])
    finding = broken_sampler.CHECK(found)
    assert finding.verdict is Verdict.FAIL
    assert "the same random numbers" in finding.summary
    # by other evidence where log-probs are missing
    bare = case([replace(r, logp_old=None, logp=None) for r in found.recent_records])
    assert broken_sampler.CHECK(bare).verdict is Verdict.FAIL


@pytest.mark.parametrize("seed", range(20))
def test_prompts_that_come_again_with_their_own_draws_are_no_fault(seed):
    assert (
        find_repeated_draws(case([generation(n, seed=100 * seed + n) for n in range(20)])) is None
    )


@pytest.mark.parametrize("seed", range(5))
def test_rows_in_order_of_length_are_no_places(seed):
    records = [generation(n, seed=100 * seed + n, order="length") for n in range(20)]
    assert find_repeated_draws(case(records)) is None


def test_later_updates_on_one_generation_are_no_draws():
    records = [generation(n, seed=3, moved=0.0, version=0) for n in range(1, 7)]
    assert find_repeated_draws(case(records)) is None


def test_unknown_versions_or_prompts_decide_nothing():
    records = [generation(n, seed=3) for n in range(1, 7)]
    for missing in ({"weight_version": None}, {"prompt_ids": None, "prompt_offsets": None}):
        assert find_repeated_draws(case([replace(r, **missing) for r in records])) is None
