"""Causes between sampler, learner and reference: each fires on its own form and no other."""

from dataclasses import replace

import numpy as np
import pytest

from checks.exact_records import (
    GROUP,
    LENGTH,
    ROWS,
    VOCABULARY,
    case,
    distributions,
    judged,
    moved,
    record,
)
from klinic.checks import (
    Verdict,
    hidden_sampling_transform,
    imprecise_logp,
    misaligned_logp,
    moved_reference,
    routing_mismatch,
    samples_too_old,
    stale_prefix_cache,
    stale_sampler,
    temperature_on_one_side,
    wrong_reference,
)

PASS, FAIL, NO_DATA = Verdict.PASS, Verdict.FAIL, Verdict.NO_DATA
FIRST = record()


def test_a_sampler_that_stays_behind_is_stale_and_the_gap_of_the_first_step_is_not():
    later = moved(record(1), 0.05)
    assert judged(stale_sampler, later, start=FIRST) is FAIL
    noisy = record(1, noise=0.05)
    assert judged(stale_sampler, moved(noisy, 0.05), start=record(2, noise=0.05)) is PASS
    assert judged(stale_sampler, FIRST, start=FIRST) is NO_DATA
    assert judged(stale_sampler, later) is NO_DATA


def test_a_sampler_that_draws_as_the_reference_is_behind_no_old_cache():
    later = moved(record(1), 0.05)
    as_reference = replace(later, logp_ref=later.logp_sampler)
    found = stale_sampler.CHECK(case(as_reference, start=FIRST))
    assert found.verdict is FAIL
    assert found.excludes == ("stale-prefix-cache",)
    elsewhere = replace(later, logp_ref=moved(record(1), 0.04).logp_old)
    assert stale_sampler.CHECK(case(elsewhere, start=FIRST)).excludes == ()
    assert stale_sampler.CHECK(case(replace(later, logp_ref=None), start=FIRST)).excludes == ()


def test_a_sampler_that_says_it_is_older_is_not_stale_but_its_samples_are_old():
    later = moved(record(1), 0.05)
    honest = replace(later, weight_version=np.full(later.num_tokens, 1))
    assert judged(stale_sampler, honest, start=FIRST) is PASS
    assert judged(samples_too_old, honest, start=FIRST) is FAIL
    allowed = {"sampler": {"max_version_lag": 2}}
    assert judged(samples_too_old, honest, start=FIRST, run=allowed) is PASS
    assert judged(samples_too_old, later, start=FIRST) is PASS


def test_fingerprints_that_differ_decide_at_once():
    facts = {**FIRST.facts, "weights_loaded": "other"}
    assert judged(stale_sampler, replace(FIRST, facts=facts)) is FAIL


def test_only_rows_behind_a_cache_are_a_stale_cache_and_no_stale_sampler():
    later = moved(record(1), 0.0)
    cached = np.arange(ROWS) % GROUP > 1
    tokens = np.repeat(cached, LENGTH)
    random = np.random.default_rng(0)
    sampler = later.logp_sampler + np.where(tokens, 0.05 * random.normal(size=len(tokens)), 0)
    hit = replace(later, logp_sampler=sampler, cached_tokens=cached.astype(np.int64))
    assert judged(stale_prefix_cache, hit) is FAIL
    assert judged(stale_sampler, hit, start=FIRST) is PASS
    everywhere = replace(hit, logp_sampler=moved(record(1), 0.05).logp_old)
    assert judged(stale_prefix_cache, everywhere) is PASS
    assert judged(stale_prefix_cache, later) is PASS


def truncated(top_p, seed=0):
    """Return what is left of the policy under top-p, lifted."""
    logp = distributions(seed)
    order = np.argsort(-logp, axis=-1)
    p = np.exp(np.take_along_axis(logp, order, -1))
    keep = np.zeros_like(logp, dtype=bool)
    np.put_along_axis(keep, order, p.cumsum(-1) - p < top_p, -1)
    kept = np.where(keep, logp, -np.inf)
    return kept - np.log(np.exp(kept).sum(-1, keepdims=True))


@pytest.mark.parametrize("top_p", [0.5, 0.8, 0.95])
def test_what_was_lifted_and_never_lowered_is_a_hidden_transform(top_p):
    narrow = truncated(top_p)
    found = record(drawn_from=narrow)
    lifted = narrow[np.arange(found.num_tokens), found.token_ids]
    found = replace(found, logp_sampler=lifted)
    assert judged(hidden_sampling_transform, found) is FAIL
    assert judged(temperature_on_one_side, found) is PASS
    assert judged(imprecise_logp, found) is PASS
    named = {"sampling": {"top_p": top_p}}
    assert judged(hidden_sampling_transform, found, run=named) is PASS


def test_bare_log_probs_of_a_narrower_distribution_are_found_by_their_surprise():
    window = [record(seed, step=seed, drawn_from=truncated(0.6, seed)) for seed in range(1, 13)]
    assert judged(hidden_sampling_transform, window[-1], earlier=window[:-1]) is FAIL
    well = [record(seed, step=seed) for seed in range(1, 13)]
    assert judged(hidden_sampling_transform, well[-1], earlier=well[:-1]) is PASS


@pytest.mark.parametrize("seed", range(6))
def test_the_surprise_of_tokens_that_were_really_drawn_is_no_evidence(seed):
    well = [record(100 * seed + n, step=n) for n in range(1, 21)]
    assert judged(hidden_sampling_transform, well[-1], earlier=well[:-1]) is PASS


def test_noise_before_the_first_update_is_imprecise_and_that_of_bf16_is_not():
    assert judged(imprecise_logp, record(noise=0.15)) is FAIL
    assert judged(imprecise_logp, record(noise=0.03)) is PASS
    later = moved(record(1), 0.2)
    assert judged(imprecise_logp, later, start=FIRST) is PASS
    assert judged(misaligned_logp, record(noise=0.15)) is PASS


def as_bf16(values):
    """Return values with the bits of a bfloat16."""
    bits = np.asarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def judge_logged_kl(kl_logged, *, policy=as_bf16, shift=-0.03, changed=0.5, **columns):
    """Judge a step whose reference differs from the policy in a fraction of the tokens."""
    later = record(1)
    differs = np.random.default_rng(3).random(later.num_tokens) < changed
    old = policy(later.logp_old)
    found = replace(
        later,
        logp_old=old,
        logp_ref=policy(old + np.where(differs, shift, 0.0)),
        facts={**later.facts, "kl_logged": kl_logged},
    )
    return judged(imprecise_logp, replace(found, **columns), start=FIRST)


def test_a_kl_that_bf16_rounds_to_0_is_imprecise():
    assert judge_logged_kl(0.0) is FAIL
    assert judge_logged_kl(0.0, logp_sampler=None) is FAIL
    assert judge_logged_kl(1e-6) is PASS
    assert judge_logged_kl(None) is PASS
    assert judge_logged_kl(0.0, policy=np.float32) is PASS  # not a matter of rounding
    assert judge_logged_kl(0.0, changed=0.0) is PASS  # no difference, so 0 is right
    assert judge_logged_kl(0.0, logp_ref=None) is PASS


def test_noise_in_some_rows_only_is_not_rounding():
    found = record()
    noise = np.zeros((ROWS, LENGTH))
    noise[: ROWS // 3] = np.random.default_rng(0).normal(size=(ROWS // 3, LENGTH))
    some = replace(found, logp_sampler=found.logp_old + noise.reshape(-1))
    assert judged(imprecise_logp, some) is PASS


def test_a_gap_where_experts_differ_is_routing_and_a_dense_model_has_none():
    found = record()
    random = np.random.default_rng(0)
    elsewhere = random.random(found.num_tokens) < 0.5
    gap = np.where(elsewhere, 0.3, 0.01) * random.normal(size=found.num_tokens)
    mixed = replace(
        found,
        logp_sampler=found.logp_old + gap,
        routing_mismatch=np.where(elsewhere, 0.1, 0.0),
    )
    experts = {"policy": {"dtype": "bf16", "num_experts": 64}}
    assert judged(routing_mismatch, mixed, run=experts) is FAIL
    assert judged(routing_mismatch, mixed) is PASS
    even = replace(mixed, logp_sampler=found.logp_old + 0.1)
    assert judged(routing_mismatch, even, run=experts) is PASS
    assert judged(routing_mismatch, found, run=experts) is NO_DATA


def test_a_kl_before_the_first_update_is_a_wrong_reference():
    other = FIRST.logp_old + 0.05 * np.random.default_rng(0).normal(size=FIRST.num_tokens)
    found = replace(FIRST, logp_ref=other)
    assert judged(wrong_reference, found) is FAIL
    assert judged(wrong_reference, FIRST) is PASS
    chosen = {"reference": {"kind": "copy", "source": "sft", "wanted": "path"}}
    assert judged(wrong_reference, found, run=chosen) is PASS
    later = replace(found, facts={**found.facts, "learner_version": 2})
    assert judged(wrong_reference, later) is NO_DATA


def test_noisy_engines_allow_a_noisy_reference():
    random = np.random.default_rng(0)
    noisy = record(noise=0.03)
    other = noisy.logp_old + 0.03 * random.normal(size=noisy.num_tokens)
    assert judged(wrong_reference, replace(noisy, logp_ref=other)) is PASS


def test_a_reference_that_agrees_to_the_last_bit_with_a_policy_that_moved():
    follows = moved(record(1), 0.05)
    follows = replace(follows, logp_ref=follows.logp_old)
    assert judged(moved_reference, follows, start=FIRST) is FAIL
    left = moved(record(1), 0.05)
    assert judged(moved_reference, left, start=FIRST) is PASS
    declared = {"reference": {"sync_every": 10}}
    assert judged(moved_reference, follows, start=FIRST, run=declared) is PASS
    still = replace(follows, facts={**follows.facts, "weights_published": "w0"})
    assert judged(moved_reference, still, start=FIRST) is NO_DATA


def test_a_reference_whose_fingerprint_changes_was_moved():
    left = moved(record(1), 0.05)
    changed = replace(left, facts={**left.facts, "reference_fingerprint": "s"})
    assert judged(moved_reference, changed, start=FIRST) is FAIL


def test_the_world_of_these_tests_is_what_it_says():
    assert FIRST.num_tokens == ROWS * LENGTH
    assert FIRST.token_ids.max() < VOCABULARY


def test_a_penalty_for_repetition_lowers_what_stood_before_and_lifts_the_rest():
    logp = distributions()
    random = np.random.default_rng(3)
    prompts = random.integers(0, VOCABULARY, ROWS * 6)
    ids, sampler, old = [], [], []
    for row in range(ROWS):
        before = set(prompts[row * 6 : row * 6 + 6].tolist())
        for n in range(LENGTH):
            raw = logp[row * LENGTH + n]
            low = np.array([raw[v] * 1.3 if v in before else raw[v] for v in range(VOCABULARY)])
            low -= np.log(np.exp(low).sum())
            token = int(random.choice(VOCABULARY, p=np.exp(low)))
            ids.append(token)
            sampler.append(low[token])
            old.append(raw[token])
            before.add(token)
    found = record(
        token_ids=np.array(ids),
        logp_sampler=np.array(sampler),
        logp_old=np.array(old),
        prompt_ids=prompts,
        prompt_offsets=np.arange(ROWS + 1) * 6,
    )
    assert judged(hidden_sampling_transform, found) is FAIL
    noisy = replace(found, logp_sampler=found.logp_old + 0.1 * random.normal(size=len(old)))
    assert judged(hidden_sampling_transform, noisy) is PASS


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_tokens_that_were_replaced_make_no_temperature(share):
    random = np.random.default_rng(0)
    found = record()
    logp = distributions()
    other = np.where(
        random.random(found.num_tokens) < share,
        random.integers(0, VOCABULARY, found.num_tokens),
        found.token_ids,
    )
    scored = logp[np.arange(len(other)), other]
    replaced = replace(found, token_ids=other, logp_old=scored, logp_ref=scored)
    assert judged(temperature_on_one_side, replaced) is PASS
