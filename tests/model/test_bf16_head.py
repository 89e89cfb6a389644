"""The head's product of bf16 operands: its error, its gradient, and a KL of 0 between equals.

The CPU never uses it; here it is allowed to, with the same roundings as on a GPU.
"""

import numpy as np
import pytest
import torch

from klinic.learner.protocol import LossScales
from klinic.model import head as head_module
from klinic.model.head import multiply_bf16
from tiny_policies import (
    apart,
    batch_of,
    drifted_reference,
    gradient,
    learner_of,
    own_reference,
    rollouts,
    small_policy,
)


@pytest.fixture
def on_cpu_too(monkeypatch):
    monkeypatch.setattr(head_module, "BF16_DEVICES", ("cpu",))


def policy_in_bf16(**section):
    policy = small_policy(**section)
    policy.scorer.head.in_bf16 = True
    return policy


def prepared(policy, reference, **settings):
    learner = learner_of(policy, reference, **settings)
    scored = learner.score(batch_of(rollouts()), needs_reference=True)
    record = learner.prepare(scored, LossScales(kl_coef=0.5)).record
    return record, gradient(policy).clone()


def test_a_cpu_keeps_its_fp32_product():
    (plain, plain_gradient), (other, other_gradient) = (
        prepared(policy, drifted_reference(policy)) for policy in (small_policy(), policy_in_bf16())
    )
    assert np.array_equal(plain.logp, other.logp)
    assert torch.equal(plain_gradient, other_gradient)


@pytest.mark.usefixtures("on_cpu_too")
def test_log_probs_and_gradients_differ_by_rounding_alone():
    (plain, plain_gradient), (rounded, rounded_gradient) = (
        prepared(policy, drifted_reference(policy)) for policy in (small_policy(), policy_in_bf16())
    )
    difference = np.abs(plain.logp - rounded.logp)
    assert 0 < difference.mean() < 0.01
    assert difference.max() < 0.05
    assert 0 < apart(rounded_gradient, plain_gradient) < 0.01


@pytest.mark.usefixtures("on_cpu_too")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("estimator", ["unbiased", "exact", "topk", "sequence"])
def test_the_kl_between_equal_policies_is_exactly_0(lora, estimator):
    policy = policy_in_bf16(**({"lora_rank": 2} if lora else {}))
    record, _ = prepared(policy, own_reference(policy, lora), estimator=estimator)
    assert np.array_equal(record.logp, record.logp_ref)
    assert np.array_equal(record.logp, record.logp_old)
    assert not np.nan_to_num(record.kl_exact).any()


@pytest.mark.usefixtures("on_cpu_too")
def test_chunks_with_an_accumulated_gradient_agree_with_autograd():
    policy = policy_in_bf16()
    layout = learner_of(policy, None).make_micro_batches(batch_of(rollouts()), 64)[0].layout
    hidden = policy.scorer.hidden(layout).detach().requires_grad_()
    weight = policy.lm.get_output_embeddings().weight
    accumulated = policy.scorer.head.new_gradient()
    weights = torch.randn(len(hidden), len(weight), generator=torch.Generator().manual_seed(0))
    results = []
    for given in (accumulated, None):
        logits = policy.scorer.head(hidden, given)
        inputs = [hidden] if given is not None else [hidden, weight]
        results.append((logits.detach(), torch.autograd.grad((logits * weights).sum(), inputs)))
    (one, (one_hidden,)), (other, (other_hidden, other_weight)) = results
    assert torch.equal(one, other)
    assert torch.equal(one_hidden, other_hidden)
    assert torch.allclose(accumulated.grad, other_weight, rtol=1e-6)


def test_sums_are_in_fp32():
    ones = torch.ones(1, 4096).bfloat16()
    small = torch.full((4096, 1), 2.0**-9).bfloat16()
    ones[0, 0], small[0, 0] = 256.0, 1.0
    exact = 256 + 4095 * 2.0**-9  # a sum in bf16 would stay at 256
    assert multiply_bf16(ones, small).item() == exact
