"""Score, prepare, commit, discard: what each leaves behind."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from klinic.learner.packing import make_micro_batches
from klinic.learner.protocol import LossScales
from klinic.learner.update import LearningRate
from klinic.model import scorer
from tiny_policies import (
    apart,
    batch_of,
    drifted_reference,
    gradient,
    learner_of,
    own_reference,
    rollouts,
    small_policy,
    weights,
)


@pytest.fixture(scope="module")
def made():
    return rollouts()


def snapshot(policy):
    return [p.detach().clone() for p in weights(policy)]


def same(before, policy):
    return all(torch.equal(a, b) for a, b in zip(before, weights(policy), strict=True))


def step(learner, record, *, kl_coef, needs_reference=True):
    prepared = learner.prepare(
        learner.score(record, needs_reference=needs_reference), LossScales(kl_coef=kl_coef)
    )
    learner.commit()
    return prepared


@pytest.mark.parametrize("lora_rank", [None, 4])
@pytest.mark.parametrize("size", [3, 64])
def test_before_the_first_update_policy_old_policy_and_reference_are_one(made, lora_rank, size):
    policy = small_policy(lora_rank=lora_rank)
    reference = own_reference(policy, lora=lora_rank is not None)
    learner = learner_of(policy, reference, micro_batch_size=size, updates_per_batch=2)
    scored = learner.score(batch_of(made, step=1), needs_reference=True)
    record = learner.prepare(scored, LossScales(kl_coef=0.1)).record
    assert np.array_equal(record.logp, record.logp_old)
    assert np.array_equal(record.logp, record.logp_ref)
    sampled = ~np.isnan(record.kl_exact)
    assert 0 < sampled.sum() < record.num_tokens
    assert (record.kl_exact[sampled] == 0).all()
    learner.commit()
    again = learner.prepare(scored, LossScales(kl_coef=0.1)).record
    assert not np.array_equal(again.logp, record.logp)
    assert np.array_equal(again.logp_old, record.logp_old)
    assert np.array_equal(again.logp_ref, record.logp_ref)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_across_layouts_log_probs_agree_to_rounding(made, size):
    policy = small_policy()
    reference = own_reference(policy, lora=False)
    found = [
        learner_of(policy, reference, micro_batch_size=s)
        .score(batch_of(made, step=1), needs_reference=True)
        .targets
        for s in (size, 64)
    ]
    assert float((found[0].logp_old - found[1].logp_old).abs().max()) <= 1e-4
    assert float((found[0].logp_ref - found[1].logp_ref).abs().max()) <= 1e-4
    assert float((found[0].logp_old - found[1].logp_ref).abs().max()) <= 1e-4


def test_preparing_and_discarding_moves_nothing(made):
    policy = small_policy()
    learner = learner_of(policy, drifted_reference(policy))
    before = snapshot(policy)
    scored = learner.score(batch_of(made), needs_reference=True)
    learner.prepare(scored, LossScales(kl_coef=0.1))
    assert gradient(policy).norm() > 0
    learner.discard()
    assert same(before, policy)
    assert gradient(policy).norm() == 0
    assert learner.publish().version == 0
    learner.prepare(scored, LossScales(kl_coef=0.1))
    learner.commit()
    assert not same(before, policy)
    assert learner.publish().version == 1


def test_preparing_twice_does_not_add_up(made):
    policy = small_policy()
    learner = learner_of(policy, drifted_reference(policy))
    scored = learner.score(batch_of(made), needs_reference=True)
    learner.prepare(scored, LossScales(kl_coef=0.1))
    once = gradient(policy).clone()
    learner.prepare(scored, LossScales(kl_coef=0.1))
    assert torch.equal(gradient(policy), once)


@pytest.mark.parametrize("estimator", ["unbiased", "exact", "sequence"])
def test_coefficient_zero_is_no_kl_at_all_and_asks_no_reference(made, estimator):
    record = batch_of(made)
    without = small_policy()
    learner = learner_of(without, None, estimator=None)
    for _ in range(3):
        step(learner, record, kl_coef=0.0, needs_reference=False)
    policy = small_policy()
    reference = drifted_reference(policy)
    learner = learner_of(policy, reference, estimator=estimator)
    for _ in range(3):
        step(learner, record, kl_coef=0.0, needs_reference=False)
    assert reference.num_forwards == 0
    assert same(snapshot(without), policy)
    watched = small_policy()
    reference = drifted_reference(watched)
    learner = learner_of(watched, reference, estimator=estimator)
    for _ in range(3):
        prepared = step(learner, record, kl_coef=0.0, needs_reference=True)
    assert reference.num_forwards == 3
    assert prepared.record.logp_ref is not None
    assert same(snapshot(without), watched)


@pytest.mark.parametrize(("updates", "runs"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("estimator", ["unbiased", "exact", "topk", "sequence"])
def test_the_reference_runs_once_where_it_can(made, estimator, updates, runs):
    policy = small_policy()
    reference = drifted_reference(policy)
    learner = learner_of(policy, reference, estimator=estimator, updates_per_batch=updates)
    scored = learner.score(batch_of(made), needs_reference=True)
    for _ in range(updates):
        learner.prepare(scored, LossScales(kl_coef=0.1))
        learner.commit()
    assert reference.num_forwards == (1 if estimator in ("unbiased", "topk") else runs)


def test_topk_is_the_kl_at_the_outcomes_that_were_likeliest_when_the_step_was_scored(
    made, monkeypatch
):
    """By hand, in the second update: the policy has moved, the outcomes and the reference not."""
    monkeypatch.setattr(scorer, "TOP_K", 5)
    policy = small_policy(double=True)
    reference = drifted_reference(policy)
    how = {"estimator": "topk", "updates_per_batch": 2, "micro_batch_size": 3, "loss": "dr_grpo"}
    policy.scorer.chunk_elements = 5 * policy.vocabulary_size
    learner = learner_of(policy, reference, **how)
    scored = learner.score(batch_of(made), needs_reference=True)
    at_first = [rows_of(policy.scorer, batch) for batch in scored.batches]
    learner.prepare(scored, LossScales(kl_coef=0.5))
    learner.commit()
    found = []
    for kl_coef in (0.0, 1.0):
        learner.prepare(scored, LossScales(kl_coef=kl_coef))
        found.append(gradient(policy).clone())
    learner.discard()
    for batch, first in zip(scored.batches, at_first, strict=True):
        targets = scored.targets.select_batch(batch)
        rest = torch.ones_like(first, dtype=torch.bool)
        rest.scatter_(-1, first.topk(5, -1).indices, value=False)
        p, q = rows_of(policy.scorer, batch).exp(), rows_of(reference.scorer, batch).exp().detach()
        kept = torch.where(rest, 0.0, p * (p / q).log()).sum(-1)
        others, of_q = torch.where(rest, p, 0.0).sum(-1), torch.where(rest, q, 0.0).sum(-1)
        term = kept + others * (others / of_q).log()
        (targets.kl_weight * term)[targets.loss_mask].sum().backward()
    assert gradient(policy).norm() > 1e-3
    assert apart(found[1] - found[0], gradient(policy)) < 1e-11


def rows_of(model, batch):
    """All log-probs at every completion token of a micro-batch."""
    return torch.log_softmax(model.head(model.hidden(batch.layout)), -1)


def test_gradients_are_clipped_to_the_norm_and_both_norms_are_told(made):
    policy = small_policy()
    learner = learner_of(policy, None, estimator=None, max_grad_norm=1e-3)
    scored = learner.score(batch_of(made), needs_reference=False)
    prepared = learner.prepare(scored, LossScales(kl_coef=0.0))
    assert prepared.metrics["grad_norm"] == pytest.approx(float(gradient(policy).norm()), rel=1e-5)
    assert prepared.metrics["grad_norm"] > 1e-3
    assert learner.commit()["grad_norm_clipped"] == 1e-3


def test_the_share_of_the_kl_in_the_gradient_is_measured_every_tenth_step(made):
    policy = small_policy(double=True)
    learner = learner_of(policy, drifted_reference(policy), micro_batch_size=3)

    def prepared_at(number, kl_coef):
        scored = learner.score(batch_of(made, step=number), needs_reference=True)
        return learner.prepare(scored, LossScales(kl_coef=kl_coef)).metrics

    assert "kl/grad_share" not in prepared_at(12, 0.5)
    looked = prepared_at(11, 0.5)
    policy_only = prepared_at(12, 0.0)["grad_norm"]
    kl_norm = looked["kl/grad_norm_kl"]
    assert looked["kl/grad_share"] == pytest.approx(kl_norm / (kl_norm + policy_only))
    total = policy_only**2 + kl_norm**2
    total += 2 * looked["kl/grad_cosine_policy"] * kl_norm * policy_only
    assert looked["grad_norm"] == pytest.approx(total**0.5, rel=1e-9)


def test_a_row_without_reward_and_a_truncated_row_leave_the_policy_term(made):
    policy = small_policy(double=True)
    record = batch_of(made)
    no_reward = record.reward.copy()
    no_reward[3] = np.nan
    kept = [i for i in range(record.num_rows) if i != 3 and record.finish_reason[i] != "length"]
    learner = learner_of(policy, None, estimator=None, loss="dapo", mask_truncated=True)
    changed = replace(record, reward=no_reward)
    learner.prepare(learner.score(changed, needs_reference=False), LossScales(kl_coef=0.0))
    dropped = gradient(policy).clone()
    few = batch_of([made[i] for i in kept])
    few = replace(few, advantage=record.advantage[kept])
    learner.prepare(learner.score(few, needs_reference=False), LossScales(kl_coef=0.0))
    assert float((gradient(policy) - dropped).norm() / dropped.norm()) < 1e-12


def test_a_loss_that_is_not_a_number_is_reported(made):
    policy = small_policy()
    learner = learner_of(policy, None, estimator=None)
    record = batch_of(made)
    advantage = record.advantage.copy()
    advantage[0] = np.inf
    scored = learner.score(replace(record, advantage=advantage), needs_reference=False)
    assert not learner.prepare(scored, LossScales(kl_coef=0.0)).is_finite


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_a_saved_learner_goes_on_with_the_same_bits(made, tmp_path, lora_rank):
    record = batch_of(made)

    def fresh():
        policy = small_policy(lora_rank=lora_rank)
        return policy, learner_of(policy, None, estimator=None)

    policy, learner = fresh()
    step(learner, record, kl_coef=0.0, needs_reference=False)
    state = learner.save(tmp_path)
    step(learner, record, kl_coef=0.0, needs_reference=False)
    other_policy, other = fresh()
    with torch.no_grad():
        for p in weights(other_policy):
            p.add_(1.0)
    other.load(tmp_path, state)
    step(other, record, kl_coef=0.0, needs_reference=False)
    assert same(snapshot(policy), other_policy)
    assert other.publish().version == 2


def test_bf16_trains_master_weights_that_keep_small_updates(made):
    policy = small_policy(dtype="bf16")
    learner = learner_of(
        policy,
        None,
        estimator=None,
        learning_rate=LearningRate(peak=1e-6, total_steps=10),
        weight_decay=0.0,
    )
    before = snapshot(policy)
    learner.prepare(
        learner.score(batch_of(made, step=11), needs_reference=False), LossScales(kl_coef=0.0)
    )
    told = learner.commit()
    assert told["unchanged_share"] < 0.5
    assert not same(before, policy)
    assert all(p.dtype == torch.float32 for p in weights(policy))


def test_the_learning_rate_rises_and_falls_as_told():
    cosine = LearningRate(peak=2.0, schedule="cosine", warmup_steps=2, total_steps=10)
    assert [cosine.at(n) for n in (0, 1, 2, 6, 10, 99)] == pytest.approx([1, 2, 2, 1, 0, 0])
    assert LearningRate(peak=2.0, total_steps=1).at(50) == 2.0


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize("number", [2, 11])
def test_a_reward_scale_multiplies_the_policy_gradient_and_not_the_kl_gradient(made, loss, number):
    policy = small_policy(double=True)
    learner = learner_of(policy, drifted_reference(policy), loss=loss)
    scored = learner.score(batch_of(made, step=number), needs_reference=True)

    def gradient_at(kl_coef, reward_scale):
        prepared = learner.prepare(scored, LossScales(kl_coef=kl_coef, reward=reward_scale))
        return gradient(policy).clone(), prepared

    rewards, plain = gradient_at(0.0, 1.0)
    kl, _ = gradient_at(1.0, 0.0)
    for scale in (0.0, 0.25, 1.0):
        both, scaled = gradient_at(0.3, scale)
        assert torch.allclose(both, scale * rewards + 0.3 * kl, rtol=1e-12, atol=1e-14)
        assert scaled.metrics["policy_loss"] == pytest.approx(scale * plain.metrics["policy_loss"])
        assert np.array_equal(scaled.record.advantage, plain.record.advantage)
        assert scaled.record.facts["loss_denominator"] == plain.record.facts["loss_denominator"]
    assert float(rewards.norm()) > 0
    assert float(kl.norm()) > 0


@pytest.mark.parametrize("estimator", ["unbiased", "exact", "k3", "k2"])
@pytest.mark.parametrize("size", [3, 64])
def test_the_logged_kl_loss_is_the_term_that_is_minimised(made, estimator, size):
    policy = small_policy(double=True)
    learner = learner_of(
        policy, drifted_reference(policy), micro_batch_size=size, estimator=estimator
    )
    record = batch_of(made)
    record = replace(record, logp_sampler=None)
    prepared = learner.prepare(learner.score(record, needs_reference=True), LossScales(kl_coef=0.3))
    scored = prepared.record
    k1 = scored.logp - scored.logp_ref
    value = {"unbiased": k1, "k2": k1**2 / 2, "k3": np.expm1(-k1) + k1}
    if estimator == "exact":  # summed over the vocabulary, here by hand
        (batch,) = make_micro_batches(record, size=64, pad_id=0, device=torch.device("cpu"))
        with torch.no_grad():
            logp, logp_ref = (
                s.log_softmax(s.logits_of(s.hidden(batch.layout)))
                for s in (policy.scorer, learner.reference.scorer)
            )
        value["exact"] = (logp.exp() * (logp - logp_ref)).sum(-1).numpy()
    weight = 1 / (record.num_rows * learner.objective.max_new_tokens)  # of dr_grpo
    expected = weight * value[estimator][record.loss_mask].sum()
    assert prepared.metrics["kl_loss"] == pytest.approx(expected, rel=1e-9)


def test_without_a_kl_term_no_kl_loss_is_logged(made):
    policy = small_policy()
    learner = learner_of(policy, drifted_reference(policy))
    scored = learner.score(batch_of(made), needs_reference=True)
    assert "kl_loss" not in learner.prepare(scored, LossScales(kl_coef=0.0)).metrics
