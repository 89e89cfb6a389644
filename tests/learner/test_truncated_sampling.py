"""Under top-k, top-p and min-p the learner's KL is that of the distribution sampled from.

Every completion that a truncated sampler can return is scored and differentiated by the real
learner. Weighted by its probability, value and gradient are compared with those of an independent
enumeration, which filters and differentiates by itself.
"""

from functools import cache

import numpy as np
import pytest
import torch

from klinic.evidence.record import EmittedBy
from klinic.evidence.rollout import Prompt, Rollout, Segment
from klinic.learner.protocol import LossScales
from klinic.model.token_filters import KeptTokens, TokenFilters
from klinic.model.weights import Weights
from klinic.sampler.token_sampling import SamplingParams
from klinic.sampler.transformers import TransformersSampler
from tiny_policies import (
    batch_of,
    drifted_reference,
    gradient,
    learner_of,
    rollouts,
    small_policy,
)

PROMPT = np.array([5, 9, 17])
NUM_TOKENS = 2
TEMPERATURE = 0.3  # small kept sets: every completion is scored
FILTERS = [
    TokenFilters(top_p=0.8),
    TokenFilters(top_k=3),
    TokenFilters(min_p=0.05),
    TokenFilters(top_k=4, top_p=0.9, min_p=0.05),
]
TOKEN_LEVEL = ["unbiased", "exact", "k2", "k3_plus", "k3_ratio", "k1_reward_immediate"]
SEQUENCE_LEVEL = ["k1_reward", "sequence"]


@pytest.fixture(scope="module")
def models():
    policy = small_policy(double=True, temperature=TEMPERATURE)
    return policy, drifted_reference(policy)


def logp_at(lm, tokens):
    ids = torch.tensor([*PROMPT, *tokens])[None]
    return (lm(ids).logits[0, -1] / TEMPERATURE).log_softmax(-1)


def kept_ids(logp, filters):
    """Filter by hand: from `min_p` on, of these the likeliest `top_k`, of these up to `top_p`."""
    order = sorted(range(len(logp)), key=lambda token: -float(logp[token]))
    lowest = filters.min_p * float(logp[order[0]].exp())
    order = [token for token in order if float(logp[token].exp()) >= lowest]
    order = order[: filters.top_k or None]
    p = np.array([float(logp[token].exp()) for token in order])
    p /= p.sum()
    before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
    return [token for token, mass in zip(order, before, strict=True) if mass < filters.top_p]


def enumerate_completions(policy, filters):
    """Return every completion with the kept set at each of its tokens."""

    def extended(tokens, kept_sets):
        if len(tokens) == NUM_TOKENS:
            return [(tokens, kept_sets)]
        with torch.no_grad():
            kept = kept_ids(logp_at(policy.lm, tokens), filters)
        return [row for t in kept for row in extended([*tokens, t], [*kept_sets, kept])]

    return extended([], [])


def restricted(lm, tokens, kept):
    """Return the log-probs of the kept tokens, renormalized."""
    return logp_at(lm, tokens)[kept].log_softmax(-1)


def probability_of(policy, row):
    with torch.no_grad():
        return float(completion_logp(policy.lm, row).exp())


def completion_logp(lm, row):
    tokens, kept_sets = row
    return sum(
        restricted(lm, tokens[:t], kept)[kept.index(tokens[t])] for t, kept in enumerate(kept_sets)
    )


def token_kl(policy, reference, tokens, kept):
    logp = restricted(policy.lm, tokens, kept)
    with torch.no_grad():
        logp_ref = restricted(reference.scorer.lm, tokens, kept)
    return (logp.exp() * (logp - logp_ref)).sum()


def expected_token_level(policy, reference, rows, probability):
    """Return value and gradient of the KL at every visited prefix, with the visits held fixed."""
    policy.lm.zero_grad()
    value = 0.0
    for row, p in zip(rows, probability, strict=True):
        for t, kept in enumerate(row[1]):
            kl = p * token_kl(policy, reference, row[0][:t], kept)
            kl.backward()
            value += float(kl.detach())
    return value, gradient(policy).clone()


def expected_sequence_level(policy, reference, rows):
    """Return value and gradient of the KL between completions."""
    policy.lm.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        logp = completion_logp(policy.lm, row)
        with torch.no_grad():
            logp_ref = completion_logp(reference.scorer.lm, row)
        total = total + logp.exp() * (logp - logp_ref)
    total.backward()
    return float(total.detach()), gradient(policy).clone()


def record_of(tokens):
    prompt = Prompt(index=0, text="", token_ids=PROMPT, columns={})
    segment = Segment(
        token_ids=np.array(tokens),
        emitted_by=EmittedBy.POLICY,
        logp_sampler=None,  # float32 in a record; the learner then uses its own
        weight_version=0,
    )
    rollout = Rollout(prompt=prompt, sample=0, segments=(segment,), finish_reason="length", text="")
    return batch_of([rollout], advantage="group_mean")


def learned(models, rows, probability, *, move=None, **settings):
    """Return the learner's value and gradient, summed over every completion."""
    policy, reference = models
    learner = learner_of(policy, reference, max_new_tokens=1, **settings)
    scored = [learner.score(record_of(tokens), needs_reference=True) for tokens, _ in rows]
    if move is not None:
        move()
    total, value = 0.0, 0.0
    for batch, p in zip(scored, probability, strict=True):
        prepared = learner.prepare(batch, LossScales(kl_coef=1.0, reward=0.0))
        total = total + p * gradient(policy)
        record = prepared.record
        value += p * float((record.logp - record.logp_ref).sum())
        learner.discard()
    return value, total


@pytest.fixture(scope="module")
def enumerated(models):
    """Return the completions of a filter and their enumerated KL; the policy never moves."""
    policy, reference = models

    @cache
    def enumerate_all(filters):
        rows = enumerate_completions(policy, filters)
        probability = [probability_of(policy, row) for row in rows]
        sequence_level = expected_sequence_level(policy, reference, rows)
        token_level = expected_token_level(policy, reference, rows, probability)
        return rows, probability, sequence_level, token_level

    return enumerate_all


def relative_error(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("estimator", TOKEN_LEVEL + SEQUENCE_LEVEL)
def test_value_and_gradient_are_those_of_the_distribution_sampled_from(
    models, enumerated, filters, estimator
):
    rows, probability, (sequence_value, of_sequence), (_, of_tokens) = enumerated(filters)
    assert sum(probability) == pytest.approx(1, abs=1e-12)
    value, actual = learned(models, rows, probability, estimator=estimator, filters=filters)
    expected = of_sequence if estimator in SEQUENCE_LEVEL else of_tokens
    assert relative_error(actual, expected) < 1e-9
    assert value == pytest.approx(sequence_value, rel=1e-9)


def test_scoring_without_the_filters_is_another_gradient(models, enumerated):
    rows, probability, _, (_, expected) = enumerated(TokenFilters(top_p=0.8))
    _, unfiltered = learned(models, rows, probability, estimator="unbiased")
    assert relative_error(unfiltered, expected) > 0.05


@pytest.mark.parametrize("estimator", ["unbiased", "exact", "k3_ratio"])
def test_the_kept_sets_stay_those_of_the_sampler_while_the_policy_moves(estimator):
    models = small_policy(double=True, temperature=TEMPERATURE), None
    models = models[0], drifted_reference(models[0])
    policy, reference = models
    filters = TokenFilters(top_p=0.8)
    rows = enumerate_completions(policy, filters)
    probability = [probability_of(policy, row) for row in rows]

    def move():
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(3)
            for p in policy.lm.parameters():
                p.add_(0.01 * torch.randn_like(p))

    _, actual = learned(
        models,
        rows,
        probability,
        move=move,
        estimator=estimator,
        filters=filters,
        updates_per_batch=2,
    )
    moved = [probability_of(policy, row) for row in rows]
    assert max(abs(a - b) for a, b in zip(moved, probability, strict=True)) > 1e-3
    _, expected = expected_token_level(policy, reference, rows, probability)
    assert relative_error(actual, expected) < 1e-9


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_learner_and_sampler_report_the_same_log_probs(filters):
    policy = small_policy(temperature=TEMPERATURE)
    params = SamplingParams(
        temperature=TEMPERATURE, top_p=filters.top_p, top_k=filters.top_k, min_p=filters.min_p
    )
    sampler = TransformersSampler(policy, params=params, max_new_tokens=6, group_size=16, seed=1)
    sampler.load(Weights(version=0, fingerprint="", location="process"))
    made = [
        r for group in sampler.sample([r.prompt for r in rollouts(4, 1)], step=1) for r in group
    ]
    learner = learner_of(policy, drifted_reference(policy), filters=filters)
    record = learner.prepare(
        learner.score(batch_of(made), needs_reference=True), LossScales(kl_coef=0.1)
    ).record
    assert (
        np.abs(record.logp - record.logp_sampler).max() < 1e-5
    )  # rounding of fp32, with and without a cache
    # without the filters, a token of a truncated sampler looks less likely than it was
    plain = learner_of(policy, None)
    unfiltered = plain.prepare(
        plain.score(batch_of(made), needs_reference=False), LossScales(kl_coef=0.0)
    ).record
    assert np.abs(unfiltered.logp - record.logp_sampler).max() > 0.05


@pytest.mark.parametrize("estimator", ["unbiased", "exact", "topk", "sequence", "k3"])
@pytest.mark.parametrize("updates", [1, 2])
def test_micro_batches_and_packing_leave_the_truncated_gradient_alone(models, estimator, updates):
    policy, reference = models
    made = rollouts(num_prompts=2, group_size=4)

    def gradient_with(**settings):
        learner = learner_of(
            policy,
            reference,
            estimator=estimator,
            updates_per_batch=updates,
            filters=TokenFilters(top_p=0.8),
            **settings,
        )
        scored = learner.score(batch_of(made), needs_reference=True)
        prepared = learner.prepare(scored, LossScales(kl_coef=0.3))
        assert prepared.is_finite
        return gradient(policy).clone()

    whole = gradient_with(micro_batch_size=64)
    for settings in ({"micro_batch_size": 1}, {"micro_batch_size": 3, "packed": True}):
        assert relative_error(gradient_with(**settings), whole) < 1e-12


def test_a_token_outside_the_set_is_kept_because_it_was_sampled(models):
    policy, _ = models
    learner = learner_of(policy, None, filters=TokenFilters(top_k=1))
    scored = learner.score(batch_of(rollouts(2, 2)), needs_reference=False)
    record = learner.prepare(scored, LossScales(kl_coef=0.0)).record
    assert np.isfinite(record.logp).all()
    sizes = np.diff(scored.batches[0].layout.kept.offsets)
    assert set(sizes.tolist()) <= {1, 2}


def test_kept_tokens_are_sliced_and_joined_like_their_mask():
    keep = torch.rand(7, 11, generator=torch.Generator().manual_seed(0)) < 0.4
    for masks in ([keep], [keep[:3], keep[3:]]):
        kept = KeptTokens.from_masks(masks)
        assert torch.equal(kept.mask(11), keep)
        parts = [kept.slice_tokens(slice(0, 3)), kept.slice_tokens(slice(3, 7))]
        assert torch.equal(parts[0].mask(11), keep[:3])
        assert torch.equal(parts[1].mask(11), keep[3:])
