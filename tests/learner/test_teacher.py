"""The KL term to a teacher: the reference's term with other log-probs, alone or beside it."""

import numpy as np
import pytest
import torch

from klinic.learner.objective import TeacherTerm
from klinic.learner.protocol import LossScales
from klinic.maths.kl_estimators import ESTIMATORS
from tiny_policies import (
    apart,
    batch_of,
    drifted_reference,
    gradient,
    learner_of,
    rollouts,
    small_policy,
)

COEF = 0.4
NO_REWARDS = LossScales(kl_coef=0.0, reward=0.0)


@pytest.fixture(scope="module")
def made():
    return rollouts(num_prompts=2, group_size=4)


@pytest.fixture(scope="module")
def models():
    policy = small_policy(double=True)
    return policy, drifted_reference(policy), drifted_reference(policy, by=0.2)


def with_teacher(policy, teacher, *, estimator="exact", alone=False, reference=None, **changes):
    term = TeacherTerm(estimator=estimator, coef=COEF, alone=alone)
    return learner_of(policy, reference, teacher_model=teacher, teacher=term, **changes)


def prepared_gradient(learner, made, scales, *, step=2):
    scored = learner.score(batch_of(made, step=step), needs_reference=learner.reference is not None)
    prepared = learner.prepare(scored, scales)
    assert prepared.is_finite
    return prepared, gradient(learner.policy).clone()


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_term_to_a_teacher_is_that_to_a_reference_with_its_weights(
    models, made, estimator, updates
):
    policy, _, teacher = models
    how = {"estimator": estimator, "updates_per_batch": updates}
    as_reference = learner_of(policy, teacher, **how)
    _, expected = prepared_gradient(as_reference, made, LossScales(kl_coef=COEF, reward=0.0))
    learner = with_teacher(policy, teacher, **how)
    prepared, found = prepared_gradient(learner, made, NO_REWARDS)
    assert expected.norm() > 1e-3
    assert apart(found, expected) < 1e-12
    assert prepared.record.logp_ref is None
    assert prepared.metrics["teacher_coef"] == COEF


@pytest.mark.parametrize("estimator", ["unbiased", "exact", "topk", "sequence"])
def test_reference_teacher_and_rewards_add_up(models, made, estimator):
    policy, reference, teacher = models
    learner = with_teacher(policy, teacher, estimator=estimator, reference=reference)
    both, found = prepared_gradient(learner, made, LossScales(kl_coef=0.3))
    parts = [
        LossScales(kl_coef=0.3, reward=0.0, teacher=0.0),
        NO_REWARDS,
        LossScales(kl_coef=0.0, teacher=0.0),
    ]
    summed = sum(prepared_gradient(learner, made, scales)[1] for scales in parts)
    assert apart(found, summed) < 1e-12
    assert not np.array_equal(both.record.logp_ref, both.record.logp_teacher)


def test_alone_no_reward_has_a_gradient(models, made):
    policy, _, teacher = models
    prepared, found = prepared_gradient(
        with_teacher(policy, teacher, alone=True), made, LossScales(kl_coef=0.0)
    )
    _, expected = prepared_gradient(with_teacher(policy, teacher), made, NO_REWARDS)
    assert prepared.metrics["policy_loss"] == 0
    assert apart(found, expected) < 1e-12


def test_no_gradient_reaches_the_teacher_and_no_update_changes_it(models, made):
    policy, _, teacher = models
    before = teacher.current_fingerprint()
    learner = with_teacher(small_policy(double=True), teacher)
    prepared, _ = prepared_gradient(learner, made, NO_REWARDS)
    learner.commit()
    assert all(p.grad is None for p in teacher.scorer.parameters())
    assert teacher.current_fingerprint() == before
    assert prepared.record.facts["teacher_fingerprint"] == before
    del policy


@pytest.mark.parametrize("estimator", ["unbiased", "exact", "topk", "sequence", "k1_reward"])
def test_micro_batches_leave_the_gradient_alone(models, made, estimator):
    policy, reference, teacher = models
    how = {"estimator": estimator, "reference": reference}
    scales = LossScales(kl_coef=0.3)
    _, whole = prepared_gradient(with_teacher(policy, teacher, **how), made, scales)
    for size in (1, 3):
        learner = with_teacher(policy, teacher, micro_batch_size=size, **how)
        assert apart(prepared_gradient(learner, made, scales)[1], whole) < 1e-12


@pytest.mark.parametrize("estimator", ["unbiased", "exact", "topk"])
def test_logits_in_chunks_leave_the_gradient_alone(models, made, estimator, monkeypatch):
    policy, _, teacher = models
    learner = with_teacher(policy, teacher, estimator=estimator)
    _, whole = prepared_gradient(learner, made, NO_REWARDS)
    monkeypatch.setattr(policy.scorer, "chunk_elements", 5 * policy.vocabulary_size)
    assert len(policy.scorer.token_chunks(20)) > 1
    assert apart(prepared_gradient(learner, made, NO_REWARDS)[1], whole) < 1e-12


def test_a_diagnostic_step_has_the_same_gradient_and_tells_its_parts(models, made):
    policy, reference, teacher = models
    learner = with_teacher(policy, teacher, reference=reference, updates_per_batch=2)
    scales = LossScales(kl_coef=0.3)
    _, plain = prepared_gradient(learner, made, scales, step=12)
    prepared, split = prepared_gradient(learner, made, scales, step=11)
    assert apart(split, plain) < 1e-12
    shares = [prepared.metrics[f"{term}/grad_share"] for term in ("kl", "teacher")]
    assert 0 < min(shares) < sum(shares) < 1
    assert prepared.record.facts["grad_norm_teacher"] > 0


def test_the_exact_kl_to_the_teacher_is_measured_with_every_estimator(models, made):
    policy, _, teacher = models
    measured = [
        prepared_gradient(with_teacher(policy, teacher, estimator=name), made, NO_REWARDS)[0]
        for name in ("exact", "unbiased")
    ]
    exact, on_a_sample = (prepared.metrics["teacher/kl_exact"] for prepared in measured)
    assert exact > 0
    assert on_a_sample == pytest.approx(exact, rel=0.5)


def test_probes_judge_each_term_without_the_others(models, made):
    policy, reference, teacher = models
    learner = with_teacher(policy, teacher, reference=reference)
    results = learner.probe(batch_of(made), kl_coef=0.3)
    for probe in ("kl_gradient", "teacher_gradient", "policy_gradient", "micro_batches"):
        assert results[probe]["ratio"] == pytest.approx(1, abs=1e-6), probe
    assert results["teacher_rescore"] == {"largest": 0.0, "mean": 0.0}
    assert torch.is_grad_enabled()
