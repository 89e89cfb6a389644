"""The gradient that is taken inside the forward pass is the one of full logits and one graph."""

from dataclasses import replace

import pytest
import torch

from klinic.learner.objective import loss_terms
from klinic.learner.protocol import LossScales
from klinic.maths.surrogate import SURROGATES
from tiny_policies import (
    LOSSES_AND_ESTIMATORS,
    apart,
    batch_of,
    drifted_reference,
    gradient,
    learner_of,
    rollouts,
    small_model,
    small_policy,
)

ALONG_THE_ROW = ("gspo", "sequence", "k1_reward", "exp_k1_reward")
KL_COEF = 0.3


@pytest.fixture(scope="module")
def record():
    return batch_of(rollouts(num_prompts=2, group_size=4), step=2)


@pytest.fixture(scope="module")
def tied():
    policy = small_policy(double=True)
    return policy, drifted_reference(policy)


def off_policy(learner, record, reference):
    """Return the batch as scored, with old log-probs that the policy has left."""
    scored = learner.score(record, needs_reference=reference is not None)
    logp = learner.rescore(scored)
    logp_old = logp + 0.1 * torch.sin(torch.arange(len(logp)))
    return replace(scored, targets=replace(scored.targets, logp_old=logp_old))


def fused_gradient(policy, reference, record, *, tokens_at_a_time, **objective):
    """Return what the learner prepares."""
    learner = learner_of(policy, reference, **objective)
    scored = off_policy(learner, record, reference)
    policy.scorer.chunk_elements, usual = (
        tokens_at_a_time * policy.vocabulary_size,
        policy.scorer.chunk_elements,
    )
    learner.prepare(scored, LossScales(kl_coef=0.0 if reference is None else KL_COEF))
    policy.scorer.chunk_elements = usual
    found = gradient(policy).clone()
    learner.discard()
    return found


def plain_gradient(policy, reference, record, **objective):
    """Return what autograd makes of one graph from the weights to the loss."""
    learner = learner_of(policy, reference, **objective)
    scored = off_policy(learner, record, reference)
    (batch,) = scored.batches
    states = None
    if objective["estimator"] in ("exact", "topk", "sequence"):
        states = replace(reference.hidden(batch.layout), topk=True)
    scores = policy.scorer(batch.layout, states)
    parts = loss_terms(scores, scored.targets.select_batch(batch), learner.objective)
    kl_coef = 0.0 if reference is None else KL_COEF
    parts.total_loss(kl_coef=kl_coef, teacher_coef=0.0).backward()
    found = gradient(policy).clone()
    learner.discard()
    return found


@pytest.mark.parametrize(("loss", "estimator"), LOSSES_AND_ESTIMATORS)
def test_every_loss_with_every_estimator(tied, record, loss, estimator):
    policy, drifted = tied
    reference = None if estimator is None else drifted
    how = {"loss": loss, "estimator": estimator, "mask_truncated": True}
    plain = plain_gradient(policy, reference, record, **how)
    assert plain.norm() > 1e-3
    for size in (7, 10_000):
        found = fused_gradient(policy, reference, record, tokens_at_a_time=size, **how)
        assert apart(found, plain) < 1e-12


@pytest.mark.parametrize("head", ["tied", "of its own", "frozen", "frozen under LoRA"])
@pytest.mark.parametrize("estimator", ["unbiased", "exact", "topk", "sequence"])
def test_every_kind_of_head(record, head, estimator):
    model = small_model(tie_word_embeddings=head == "tied")
    lora = {"lora_rank": 4} if head == "frozen under LoRA" else {}
    policy = small_policy(double=True, model=model, **lora)
    if head == "frozen":
        policy.lm.get_output_embeddings().weight.requires_grad_(False)
    reference = drifted_reference(policy)
    how = {"loss": "dr_grpo", "estimator": estimator}
    plain = plain_gradient(policy, reference, record, **how)
    found = fused_gradient(policy, reference, record, tokens_at_a_time=5, **how)
    assert plain.norm() > 1e-6
    assert apart(found, plain) < 1e-12


@pytest.mark.parametrize("name", ALONG_THE_ROW)
def test_a_loss_that_looks_along_the_row_may_not_be_cut(tied, record, name, monkeypatch):
    """What is said of a loss matters: taken for token by token, its gradient is another one."""
    policy, reference = tied
    how = (
        {"loss": name, "estimator": "unbiased"}
        if name in SURROGATES
        else {"loss": "dr_grpo", "estimator": name}
    )
    plain = plain_gradient(policy, reference, record, **how)
    objective = type(learner_of(policy, reference, **how).objective)
    monkeypatch.setattr(objective, "token_by_token", True)
    found = fused_gradient(policy, reference, record, tokens_at_a_time=2, **how)
    assert apart(found, plain) > 1e-4


def test_a_gradient_is_used_once(tied, record):
    policy, _ = tied
    learner = learner_of(policy, None)
    scored = learner.score(record, needs_reference=False)
    _, number = policy.scorer.score_and_loss(
        scored.batches[0].layout, None, lambda scores, _: scores.logp.sum(), token_by_token=True
    )
    torch.autograd.backward(number, retain_graph=True)
    with pytest.raises(RuntimeError, match="supports one backward pass"):
        torch.autograd.backward(number)
    learner.discard()
