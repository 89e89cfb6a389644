"""The learner weights policy and KL term as the mode says, however the step is cut."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from klinic.learner.probes import probe_kl_gradient
from klinic.learner.protocol import LossScales
from klinic.maths.importance import ImportanceSampling, Mode
from tiny_policies import (
    apart,
    batch_of,
    drifted_reference,
    gradient,
    learner_of,
    rollouts,
    small_policy,
)

MODES = get_args(Mode)
CAP = 1.5


@pytest.fixture(scope="module")
def models():
    policy = small_policy(double=True)
    return policy, drifted_reference(policy)


@pytest.fixture(scope="module")
def batch(models):
    """A batch whose sampler is near enough to the policy that some weights are above the cap."""
    record = batch_of(rollouts(num_prompts=2, group_size=3))
    logp = logp_of(models, record)
    drift = np.random.default_rng(3).normal(0, 0.4, len(logp))
    sampler = np.where(np.isnan(record.logp_sampler), np.nan, logp + drift)
    return replace(record, logp_sampler=sampler.astype(np.float32))


def logp_of(models, record):
    learner = learner_of(*models)
    scored = learner.score(record, needs_reference=False)
    return learner.prepare(scored, LossScales(kl_coef=0.0)).record.logp


def gradient_of(models, batch, *, kl_coef=0.0, reward=1.0, size=64, **changes):
    learner = learner_of(*models, micro_batch_size=size, **changes)
    scored = learner.score(batch, needs_reference=kl_coef > 0)
    assert learner.prepare(scored, LossScales(kl_coef=kl_coef, reward=reward)).is_finite
    return gradient(models[0]).clone()


def weights_by_hand(mode, models, batch):
    logp = logp_of(models, batch)
    log_ratio = np.where(batch.loss_mask, logp - batch.logp_sampler, 0.0)
    weight = np.zeros(len(logp))
    for start, stop in zip(batch.row_offsets[:-1], batch.row_offsets[1:], strict=True):
        row = slice(start, stop)
        ratio = np.exp(log_ratio[row].sum() if "sequence" in mode else log_ratio[row])
        weight[row] = np.where(ratio > CAP, 0.0 if "mask" in mode else CAP, ratio)
    return weight


@pytest.fixture(scope="module")
def token_gradients(models, batch):
    """Return the uncorrected policy gradient of each trained token alone."""
    found = {}
    for token in np.flatnonzero(batch.loss_mask):
        alone = np.zeros_like(batch.loss_mask)
        alone[token] = True
        # dr_grpo divides by the rows with a trained token
        found[token] = gradient_of(models, replace(batch, loss_mask=alone)) / batch.num_rows
    return found


@pytest.mark.parametrize("mode", MODES)
def test_the_policy_term_is_weighted_token_by_token(models, batch, token_gradients, mode):
    weight = weights_by_hand(mode, models, batch)
    assert len(set(weight[batch.loss_mask].round(6))) > 2
    expected = sum(weight[token] * g for token, g in token_gradients.items())
    sampling = ImportanceSampling(mode=mode, cap=CAP)
    how = {"importance_sampling": sampling, "corrects_policy_term": True}
    assert apart(gradient_of(models, batch, **how), expected) < 1e-6  # a record has float32
    assert apart(gradient_of(models, batch), expected) > 1e-2


@pytest.mark.parametrize("estimator", ["unbiased", "exact", "topk"])
@pytest.mark.parametrize("mode", MODES)
def test_the_kl_term_is_weighted_as_another_implementation_weights_it(
    models, batch, mode, estimator
):
    sampling = ImportanceSampling(mode=mode, cap=CAP)
    learner = learner_of(*models, estimator=estimator, importance_sampling=sampling)
    probed = probe_kl_gradient(learner, learner.score(batch, needs_reference=True))
    assert probed["looks_like"] == estimator
    assert probed["ratio"] == pytest.approx(1, abs=1e-9)
    assert probed["cosine"] == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("estimator", ["unbiased", "exact", "sequence", "k1_reward"])
@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_and_packing_leave_the_gradient_alone(models, batch, mode, estimator):
    how = {
        "importance_sampling": ImportanceSampling(mode=mode, cap=CAP),
        "corrects_policy_term": True,
        "estimator": estimator,
        "kl_coef": 0.3,
    }
    whole = gradient_of(models, batch, **how)
    assert whole.norm() > 1e-3
    for size in (1, 4):
        assert apart(gradient_of(models, batch, size=size, **how), whole) < 1e-12
    assert apart(gradient_of(models, batch, size=4, packed=True, **how), whole) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_a_sampler_that_is_the_policy_changes_nothing(models, mode):
    """A record without the sampler's log-probs: the learner then uses its own."""
    made = [
        replace(r, segments=tuple(replace(s, logp_sampler=None) for s in r.segments))
        for r in rollouts(num_prompts=2, group_size=3)
    ]
    record = batch_of(made)
    plain = gradient_of(models, record, kl_coef=0.3)
    how = {"importance_sampling": ImportanceSampling(mode=mode), "corrects_policy_term": True}
    assert torch.equal(gradient_of(models, record, kl_coef=0.3, **how), plain)
