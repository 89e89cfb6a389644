"""The one log-prob function, against plain softmax over the model's own logits."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, modeling_utils

from klinic.model.adapters import base_digest
from klinic.model.layout import pad_rows
from klinic.model.loading import PADDING_WARNING, disable_padding_warning
from klinic.model.scorer import TokenScorer
from tiny_policies import drifted_reference, own_reference, small_policy

CPU = torch.device("cpu")
PROMPTS = [np.array([5, 6, 7]), np.array([9]), np.array([10, 11, 12, 13, 14])]
COMPLETIONS = [np.array([20, 21, 22, 23]), np.array([24, 25]), np.array([26])]


def plain_log_probs(policy, temperature=1.0):
    """Return log-probs of every outcome at every completion token, one row alone at a time."""
    rows = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, completion]))[None]
        logits = policy.lm(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        rows.append(torch.log_softmax(logits.double() / temperature, -1))
    return torch.cat(rows)


@pytest.fixture
def layout():
    return pad_rows(PROMPTS, COMPLETIONS, pad_id=0, device=CPU)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tokens_at_a_time", [1, 3, 1000])
def test_log_prob_entropy_and_rank_are_the_softmax_s(layout, temperature, tokens_at_a_time):
    policy = small_policy(double=True, temperature=temperature)
    policy.scorer.chunk_elements = tokens_at_a_time * policy.vocabulary_size
    scores = policy.scorer(layout)
    whole = plain_log_probs(policy, temperature)
    target = torch.from_numpy(np.concatenate(COMPLETIONS))[:, None]
    logp = whole.gather(-1, target)[:, 0]
    torch.testing.assert_close(scores.logp, logp, rtol=0, atol=1e-12)
    torch.testing.assert_close(scores.entropy, -(whole.exp() * whole).sum(-1), rtol=0, atol=1e-12)
    assert scores.rank.tolist() == (whole > logp[:, None]).sum(-1).tolist()
    alone = policy.scorer.logp(policy.scorer.hidden(layout), layout.targets)
    assert torch.equal(alone, scores.logp)


@pytest.mark.parametrize("tokens_at_a_time", [2, 1000])
def test_exact_kl_and_its_gradient_are_those_of_the_whole_distributions(layout, tokens_at_a_time):
    policy = small_policy(double=True)
    reference = drifted_reference(policy)
    policy.scorer.chunk_elements = tokens_at_a_time * policy.vocabulary_size
    scores = policy.scorer(layout, reference.hidden(layout))
    p = plain_log_probs(policy)
    q = plain_log_probs(type(policy)(**{**_fields(policy), "scorer": reference.scorer})).detach()
    expected = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(scores.kl_exact, expected, rtol=0, atol=1e-12)
    weights = list(policy.lm.parameters())
    ours = torch.autograd.grad(scores.kl_exact.sum(), weights)
    theirs = torch.autograd.grad(expected.sum(), weights)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def _fields(policy):
    return {name: getattr(policy, name) for name in type(policy).__slots__}


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_the_reference_is_the_policy_until_it_moves(layout, lora_rank):
    policy = small_policy(lora_rank=lora_rank)
    reference = own_reference(policy, lora=lora_rank is not None)
    hidden = reference.hidden(layout)
    scores = policy.scorer(layout, hidden)
    assert torch.equal(scores.logp, reference.logp(hidden, layout.targets))
    assert torch.equal(scores.kl_exact, torch.zeros_like(scores.kl_exact))
    with torch.no_grad():
        for p in policy.lm.parameters():
            if p.requires_grad:
                p.add_(0.05)
    moved = policy.scorer(layout, reference.hidden(layout))
    assert torch.equal(reference.logp(hidden, layout.targets), scores.logp)
    assert float(moved.kl_exact.detach().min()) > 0


def test_an_adapter_switched_off_is_counted_apart_from_one_that_is_on():
    policy = small_policy(lora_rank=4)
    reference = own_reference(policy, lora=True)
    before = reference.digest
    with torch.no_grad():
        for p in policy.lm.parameters():
            if p.requires_grad:
                p.add_(1.0)
    assert base_digest(policy.lm) == before


@pytest.mark.parametrize("size", [1, 2, 3])
def test_padding_does_not_change_a_log_prob(size):
    policy = small_policy()
    whole = policy.scorer(pad_rows(PROMPTS, COMPLETIONS, pad_id=0, device=CPU)).logp
    parts = [
        policy.scorer(
            pad_rows(PROMPTS[i : i + size], COMPLETIONS[i : i + size], pad_id=0, device=CPU)
        ).logp
        for i in range(0, 3, size)
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-4)
    other_pad = policy.scorer(pad_rows(PROMPTS, COMPLETIONS, pad_id=31, device=CPU)).logp
    assert torch.equal(other_pad, whole)


def test_bf16_copies_of_the_weights_are_not_kept(layout):
    """A cache would hold them all until the end of the pass, whole ones under FSDP2."""
    policy, enabled = small_policy(dtype="bf16"), []
    for module in policy.lm.modules():
        if not list(module.children()):
            module.register_forward_hook(
                lambda *_: enabled.append(torch.is_autocast_cache_enabled())
            )
    policy.scorer.hidden(layout)
    assert enabled
    assert not any(enabled)


def test_bf16_computes_in_bf16_and_takes_log_probs_in_fp32(layout):
    precise, rough = small_policy(), small_policy(dtype="bf16")
    a, b = precise.scorer(layout).logp, rough.scorer(layout).logp
    assert b.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in rough.lm.parameters())
    assert 0 < float((a - b).detach().abs().max()) < 0.2


def test_a_model_that_warns_of_padding_has_no_reason_to(monkeypatch):
    said = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", said.append)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 32, "pad_token_id": 0}
    lm = GPT2LMHeadModel(GPT2Config(**sizes))
    disable_padding_warning(lm)
    scorer = TokenScorer(lm, temperature=1.0)
    padded = pad_rows(
        [np.array([5, 6])] * 2, [np.array([7]), np.array([8, 9])], pad_id=0, device=CPU
    )
    scorer(padded)
    assert not said
    del vars(lm.transformer)[PADDING_WARNING]
    scorer(padded)
    assert "attention_mask" in said[0]
