"""Cutting a step into micro-batches, or shuffling its rows, does not change its gradient."""

from itertools import cycle

import numpy as np
import pytest
import torch

from klinic.learner.protocol import LossScales
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.maths.surrogate import SURROGATES
from tiny_policies import (
    LOSSES_AND_ESTIMATORS,
    apart,
    batch_of,
    drifted_reference,
    gradient,
    learner_of,
    rollouts,
    small_policy,
)


@pytest.fixture(scope="module")
def made():
    return rollouts(num_prompts=2, group_size=4)


@pytest.fixture(scope="module")
def double():
    policy = small_policy(double=True)
    return policy, drifted_reference(policy)


def gradient_of(policy, reference, made, *, size, kl_coef=0.3, step=2, **changes):
    learner = learner_of(policy, reference, micro_batch_size=size, **changes)
    scored = learner.score(batch_of(made, step=step), needs_reference=reference is not None)
    prepared = learner.prepare(
        scored, LossScales(kl_coef=kl_coef if reference is not None else 0.0)
    )
    assert prepared.is_finite
    return gradient(policy).clone()


def check_cuts(double, made, loss, estimator, cuts):
    """Compare the gradient of all rows with that of shuffled rows, cut and packed."""
    policy, drifted = double
    reference = None if estimator is None else drifted
    how = {"loss": loss, "estimator": estimator, "mask_truncated": True}
    whole = gradient_of(policy, reference, made, size=64, **how)
    assert whole.norm() > 1e-3
    order = np.random.default_rng(0).permutation(len(made))
    shuffled = [made[i] for i in order]
    for size, packed in cuts:
        cut = gradient_of(policy, reference, shuffled, size=size, packed=packed, **how)
        assert apart(cut, whole) < 1e-12


@pytest.mark.parametrize(("loss", "estimator"), LOSSES_AND_ESTIMATORS)
def test_micro_batches_and_row_order_leave_the_gradient_alone(double, made, loss, estimator):
    # rows of 3, 3 and 2, so that a mean over micro-batches is not that over rows
    check_cuts(double, made, loss, estimator, [(3, True)])


SOME = set(zip(cycle(SURROGATES), (*ESTIMATORS, None), strict=False)) & {*LOSSES_AND_ESTIMATORS}


def test_some_pairs_have_every_loss_and_every_estimator():
    losses, estimators = zip(*SOME, strict=True)
    assert {*losses} == {*SURROGATES}
    assert {*estimators} == {None, *ESTIMATORS}


@pytest.mark.parametrize(
    ("loss", "estimator"),
    [
        pytest.param(*pair, marks=() if pair in SOME else pytest.mark.slow)
        for pair in LOSSES_AND_ESTIMATORS
    ],
)
def test_any_cut_leaves_the_gradient_alone(double, made, loss, estimator):
    cuts = [(1, False), (2, False), (3, False), (2, True), (64, True)]
    check_cuts(double, made, loss, estimator, cuts)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_in_float32_micro_batches_agree_to_rounding(made, estimator):
    policy = small_policy()
    reference = drifted_reference(policy)
    whole = gradient_of(policy, reference, made, size=64, estimator=estimator)
    cut = gradient_of(policy, reference, made, size=1, estimator=estimator)
    assert apart(cut, whole) < 1e-5


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_gradient_is_linear_in_the_kl_coefficient(double, made, estimator):
    policy, reference = double
    at = {
        coef: gradient_of(policy, reference, made, size=64, kl_coef=coef, estimator=estimator)
        for coef in (0.0, 0.5, 1.0, 3.0)
    }
    kl = at[1.0] - at[0.0]
    assert kl.norm() > 1e-4
    for coef in (0.5, 3.0):
        assert apart(at[coef], at[0.0] + coef * kl) < 1e-12


def test_looking_at_the_share_of_the_kl_does_not_change_the_gradient(double, made):
    policy, reference = double
    looked = gradient_of(policy, reference, made, size=4, step=11)
    assert apart(looked, gradient_of(policy, reference, made, size=4, step=12)) < 1e-12


def test_gradient_checkpointing_and_chunks_do_not_change_the_gradient(made):
    plain = small_policy(double=True)
    expected = gradient_of(plain, drifted_reference(plain), made, size=4, estimator="exact")
    thrifty = small_policy(double=True, gradient_checkpointing=True)
    thrifty.scorer.chunk_elements = 5 * thrifty.vocabulary_size
    got = gradient_of(thrifty, drifted_reference(thrifty), made, size=4, estimator="exact")
    assert apart(got, expected) < 1e-12


def test_a_tool_s_tokens_pull_at_nothing(double, made):
    """The mask holds in the whole chain: what a tool said may be anything a log-prob can be."""
    policy, reference = double
    record = batch_of(made)
    learner = learner_of(policy, reference, estimator="exact")
    scored = learner.score(record, needs_reference=True)
    learner.prepare(scored, LossScales(kl_coef=1.0))
    before = gradient(policy).clone()
    outside = torch.from_numpy(~record.loss_mask)
    assert outside.any()
    scored.targets.logp_ref[outside] = torch.nan
    learner.prepare(scored, LossScales(kl_coef=1.0))
    assert torch.equal(gradient(policy), before)
