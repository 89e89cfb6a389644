"""A frozen base in bf16 halves its memory and changes no bit of what bf16 training computes."""

import pytest
import torch

from klinic.learner.checkpoint import save_model
from klinic.model import loading
from klinic.model.adapters import add_frozen_copy, base_digest, has_adapter
from klinic.model.equivalence import probe_layout, probe_logp
from klinic.model.frozen_base import Bf16Embedding, Bf16Linear
from klinic.model.reference import reference_at_start
from klinic.model.scorer import TokenScorer
from model.foreign import KINDS, policy_of, write_adapter, write_base

PLAIN_KINDS = [kind for kind in KINDS if kind not in ("dora", "own_head", "own_norm")]


@pytest.fixture(scope="module")
def fp32_base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("models") / "fp32")


@pytest.fixture(scope="module")
def base(fp32_base):
    """A model of entries that bf16 holds exactly."""
    policy = policy_of(fp32_base)
    policy.lm.to(torch.bfloat16).to(torch.float32)
    save_model(fp32_base.with_name("base"), policy)
    return fp32_base.with_name("base")


@pytest.fixture(scope="module")
def untied_base(base):
    """A model with its own head, of entries that bf16 holds exactly."""
    lm = policy_of(base).lm
    lm.config.tie_word_embeddings = False
    lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.detach().clone())
    folder = base.with_name("untied")
    lm.save_pretrained(folder)
    policy_of(base).tokenizer.save_pretrained(folder)
    return folder


def with_fp32_base(monkeypatch, name, **section):
    """Return the policy as it is without the conversion."""
    with monkeypatch.context() as patched:
        patched.setattr(loading, "store_base_in_bf16", lambda lm: None)
        return policy_of(name, dtype="bf16", **section)


def logp_and_gradients(policy):
    scores = policy.scorer(probe_layout(policy.lm, policy.scorer.device))
    (scores.logp.sum() + scores.logp.square().sum()).backward()
    gradients = {n: p.grad for n, p in policy.lm.named_parameters() if p.requires_grad}
    return scores.logp.detach(), gradients


def assert_bitwise_equal(policy, expected):
    logp, gradients = logp_and_gradients(policy)
    expected_logp, expected_gradients = logp_and_gradients(expected)
    assert torch.equal(logp, expected_logp)
    assert gradients.keys() == expected_gradients.keys()
    assert all(torch.equal(gradients[name], expected_gradients[name]) for name in gradients)


def test_a_new_adapter_computes_the_same_bits(base, untied_base, monkeypatch):
    for name in (base, untied_base):
        policy = policy_of(name, dtype="bf16", lora_rank=4)
        assert_bitwise_equal(policy, with_fp32_base(monkeypatch, name, lora_rank=4))


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_a_trained_adapter_computes_the_same_bits(kind, base, monkeypatch):
    adapter = write_adapter(base.with_name(kind), base, **KINDS[kind])
    policy = policy_of(adapter, dtype="bf16")
    assert any(isinstance(module, Bf16Linear) for module in policy.lm.modules())
    assert_bitwise_equal(policy, with_fp32_base(monkeypatch, adapter))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["dora", "own_head"])
def test_an_adapter_that_reads_base_weights_keeps_them_in_fp32(kind, base, monkeypatch):
    adapter = write_adapter(base.with_name(kind), base, **KINDS[kind])
    policy = policy_of(adapter, dtype="bf16")
    assert all(p.dtype == torch.float32 for p in policy.lm.parameters())
    assert_bitwise_equal(policy, with_fp32_base(monkeypatch, adapter))


def test_rounding_too_much_is_seen(base, monkeypatch):
    """The comparison notices weights that bf16 does not hold exactly."""
    policy = policy_of(base, dtype="bf16", lora_rank=4)
    policy.lm.get_output_embeddings().weight.data *= 1 + 2**-12
    with pytest.raises(AssertionError):
        assert_bitwise_equal(policy, with_fp32_base(monkeypatch, base, lora_rank=4))


def test_only_frozen_weights_of_products_are_stored_in_bf16(base, untied_base):
    lm = policy_of(base, dtype="bf16", lora_rank=4).lm
    stored = {n for n, p in lm.named_parameters() if p.dtype == torch.bfloat16}
    assert stored == {n for n, p in lm.named_parameters() if ".base_layer." in n}
    untied = policy_of(untied_base, dtype="bf16", lora_rank=4).lm
    assert isinstance(untied.get_input_embeddings(), Bf16Embedding)
    assert untied.get_output_embeddings().weight.dtype == torch.float32


def test_weights_that_bf16_would_round_stay_in_fp32(fp32_base):
    policy = policy_of(fp32_base, dtype="bf16", lora_rank=4)
    assert all(p.dtype == torch.float32 for p in policy.lm.parameters())


@pytest.mark.parametrize("section", [{}, {"dtype": "bf16"}, {"lora_rank": 4}])
def test_without_both_bf16_and_an_adapter_nothing_changes(base, section):
    lm = policy_of(base, **section).lm
    assert has_adapter(lm) == ("lora_rank" in section)
    assert all(p.dtype == torch.float32 for p in lm.parameters())


def test_the_kl_starts_at_exactly_0(untied_base):
    policy = policy_of(untied_base, dtype="bf16", lora_rank=4)
    reference = reference_at_start(policy.scorer, source="")
    assert reference.kind == "adapter_off"
    layout = probe_layout(policy.lm, policy.scorer.device)
    logp_ref = reference.logp(reference.hidden(layout), layout.targets)
    assert torch.equal(policy.scorer(layout).logp.detach(), logp_ref)


def test_scoring_in_fp32_still_works_and_is_exact_for_a_bf16_model(untied_base):
    stored = policy_of(untied_base, dtype="bf16", lora_rank=4)
    in_fp32 = TokenScorer(stored.lm, temperature=1.0)
    assert torch.equal(probe_logp(in_fp32), probe_logp(policy_of(untied_base, lora_rank=4).scorer))


def test_a_frozen_copy_of_the_adapter_is_fp32(base):
    policy = policy_of(base, dtype="bf16", lora_rank=4)
    for _, p in policy.lm.named_parameters():
        p.data = p.data.to(torch.bfloat16) if p.requires_grad else p.data
    add_frozen_copy(policy.lm)
    trained_dtypes = {p.dtype for n, p in policy.lm.named_parameters() if ".reference." in n}
    assert trained_dtypes == {torch.bfloat16}  # that of the trained adapter, whatever PEFT makes


def test_a_model_published_in_bf16_keeps_its_identity(untied_base, monkeypatch):
    stored = policy_of(untied_base, dtype="bf16", lora_rank=4)
    in_fp32 = with_fp32_base(monkeypatch, untied_base, lora_rank=4)
    assert base_digest(stored.lm) == base_digest(in_fp32.lm)
