"""Causes of a gap with a test of their own: each fires on its form, and not on its healthy twin."""

from dataclasses import replace

import numpy as np
import pytest

from checks.exact_records import LENGTH, ROWS, VOCABULARY, case, distributions, judged, record
from checks.test_gap_models import PICK, ROW_NAMES, scored, sharp
from checks.test_sampler_and_reference import truncated
from klinic.checks import (
    CHECKS,
    Verdict,
    corrupted_sync,
    gap_grows_with_position,
    hidden_sampling_transform,
    truncation_not_mirrored,
    unexplained_gap,
    unnormalised_logp,
)

PASS, FAIL, NO_DATA = Verdict.PASS, Verdict.FAIL, Verdict.NO_DATA


@pytest.mark.parametrize("column", ["logp_sampler", "logp", "logp_old", "logp_ref"])
def test_a_log_prob_above_0_is_impossible_on_every_side(column):
    found = record()
    above = getattr(found, column).copy()
    above[7] = 0.7
    assert judged(unnormalised_logp, replace(found, **{column: above})) is FAIL
    above[7] = 5e-4
    assert judged(unnormalised_logp, replace(found, **{column: above})) is PASS


def test_rounding_of_bf16_may_exceed_0_and_untrained_tokens_do_not_count():
    found = record()
    above = found.logp_sampler.copy()
    above[7] = 0.2
    rounded = replace(found, logp_sampler=above)
    assert judged(unnormalised_logp, rounded, run={"policy": {"dtype": "bf16"}}) is PASS
    mask = found.loss_mask.copy()
    mask[7] = False
    assert judged(unnormalised_logp, replace(rounded, loss_mask=mask)) is PASS


def test_entropies_and_ranks_have_bounds():
    found = record()
    order = np.argsort(-distributions(), axis=-1)
    rank = np.argmax(order == found.token_ids[:, None], axis=-1)
    assert judged(unnormalised_logp, replace(found, rank=rank)) is PASS
    wrong_rank = replace(found, rank=np.where(rank == 0, 20, rank))
    assert judged(unnormalised_logp, wrong_rank) is FAIL
    for entropy in (-0.1, 2 * np.log(VOCABULARY)):
        odd = replace(found, entropy=np.full(found.num_tokens, entropy))
        assert judged(unnormalised_logp, odd) is FAIL


def lifted(top_p):
    narrow = truncated(top_p)
    found = record(drawn_from=narrow)
    return replace(found, logp_sampler=narrow[PICK, found.token_ids])


@pytest.mark.parametrize(("top_p", "said"), [(0.4, FAIL), (0.9, PASS), (0.95, PASS)])
def test_a_declared_truncation_counts_if_it_exceeds_the_clip_range(top_p, said):
    declared = {"sampling": {"top_p": top_p}}
    assert judged(truncation_not_mirrored, lifted(top_p), run=declared) is said
    mirrored = replace(lifted(top_p), logp_old=lifted(top_p).logp_sampler)
    assert judged(truncation_not_mirrored, mirrored, run=declared) is PASS
    assert judged(truncation_not_mirrored, lifted(top_p)) is PASS


def test_a_truncation_beyond_the_declared_one_is_hidden():
    assert judged(hidden_sampling_transform, lifted(0.5), run={"sampling": {"top_p": 0.9}}) is FAIL
    for top_p in (0.5, 0.9):
        named = {"sampling": {"top_p": top_p}}
        assert judged(hidden_sampling_transform, lifted(top_p), run=named) is PASS
    with_top_k = {"sampling": {"top_p": 0.9, "top_k": 2}}
    assert judged(hidden_sampling_transform, lifted(0.5), run=with_top_k) is PASS


def long_rows(length=60, rows=4):
    found = record()
    return replace(
        found,
        row_offsets=np.arange(rows + 1) * length,
        **{name: getattr(found, name)[:rows] for name in ROW_NAMES},
    )


@pytest.mark.parametrize(("size", "said"), [(1.0, FAIL), (0.02, PASS)])
def test_a_gap_that_grows_along_the_row(size, said):
    found = long_rows()
    position = np.tile(np.arange(60), 4) / 60
    noise = size * np.random.default_rng(0).normal(size=found.num_tokens)
    grows = replace(found, logp_sampler=found.logp_old + position**3 * noise)
    assert judged(gap_grows_with_position, grows) is said
    even = replace(found, logp_sampler=found.logp_old + noise)
    assert judged(gap_grows_with_position, even) is PASS


def other_weights(version=0, **columns):
    """Return tokens that another network sampled, as its engine reports them."""
    mix = 0.7 * distributions() + 0.8 * distributions(9)
    other = mix - np.log(np.exp(mix).sum(-1, keepdims=True))
    found = scored(distributions(), other)
    facts = {**found.facts, "learner_version": version, "weights_loaded": None}
    return replace(found, facts=facts, **columns)


ENGINE = {"sampler": {"dtype": "fp32", "shares_weights": False}}


def test_a_sampler_with_other_weights_before_any_update_is_a_corrupted_sync():
    assert judged(corrupted_sync, other_weights(), run=ENGINE) is FAIL
    healthy = replace(record(noise=0.03), facts=other_weights().facts)
    assert judged(corrupted_sync, healthy, run=ENGINE) is PASS
    noisy = replace(record(noise=0.6), facts=other_weights().facts)
    assert judged(corrupted_sync, noisy, run=ENGINE) is PASS


def test_equal_tensors_leave_the_gap_unexplained():
    shared = {"sampler": {"dtype": "fp32", "shares_weights": True}}
    assert judged(corrupted_sync, other_weights(), run=shared) is PASS
    assert judged(unexplained_gap, other_weights(), run=shared) is FAIL
    agreed = {**other_weights().facts, "weights_published": "w", "weights_loaded": "w"}
    assert judged(corrupted_sync, replace(other_weights(), facts=agreed), run=ENGINE) is PASS


def test_after_updates_other_weights_are_farther_than_the_policy_has_moved():
    near = other_weights(version=3)
    small = 0.05 * np.random.default_rng(0).normal(size=near.num_tokens)
    assert judged(corrupted_sync, replace(near, logp_ref=near.logp_old + small), run=ENGINE) is FAIL
    old = replace(near, logp_ref=near.logp_sampler)  # as a sampler that never got an update
    assert judged(corrupted_sync, old, run=ENGINE) is PASS
    assert judged(corrupted_sync, replace(near, logp_ref=None), run=ENGINE) is NO_DATA


def test_a_healthy_step_fails_no_check_of_the_gap():
    names = {"unexplained-gap", "corrupted-sync", "gap-grows-with-position", "unnormalised-logp"}
    for found in (record(), record(noise=0.03), scored(sharp(), sharp())):
        failed = [c.name for c in CHECKS if c(case(found, run=ENGINE)).verdict is FAIL]
        assert not names & set(failed)
    assert record().num_tokens == ROWS * LENGTH
