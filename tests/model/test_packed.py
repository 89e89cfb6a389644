"""Rows that lie end to end: as if alone, in models that know them apart, and only in those."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from klinic.model.layout import pack_rows, pad_rows
from klinic.model.scorer import TokenScorer, keeps_rows_independent, supports_packing

CPU = torch.device("cpu")
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_key_value_heads": 2,
}
KNOW_ROWS_APART = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64},
    "gpt_neox": {k: v for k, v in COMMON.items() if k != "num_key_value_heads"},
    "llama": COMMON,
    "qwen2": COMMON,
    "qwen3": {**COMMON, "head_dim": 8},
    "mistral": {**COMMON, "sliding_window": 4},
    "gemma2": {**COMMON, "head_dim": 8, "sliding_window": 4},
}
DO_NOT = {
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
}


def scorer_of(name, how, dtype=torch.float64):
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(name, vocab_size=64, **special, **how)
    return TokenScorer(AutoModelForCausalLM.from_config(config).to(dtype).eval(), temperature=1.0)


def rows():
    stream = torch.Generator().manual_seed(3)
    made = [torch.randint(3, 64, (n,), generator=stream).numpy() for n in (5, 9, 2, 12)]
    return [row[:1] for row in made], [row[1:] for row in made]


@pytest.mark.parametrize("name", KNOW_ROWS_APART)
def test_packed_rows_are_scored_as_if_alone(name):
    scorer = scorer_of(name, KNOW_ROWS_APART[name])
    assert keeps_rows_independent(scorer)
    packed = scorer(pack_rows(*rows(), device=CPU)).logp
    apart = scorer(pad_rows(*rows(), pad_id=0, device=CPU)).logp
    assert (packed - apart).abs().max() < 1e-10


@pytest.mark.parametrize("name", DO_NOT)
def test_a_model_that_mixes_rows_shows(name):
    assert not keeps_rows_independent(scorer_of(name, DO_NOT[name]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_sign_of_mixing(dtype):
    assert keeps_rows_independent(scorer_of("qwen2", KNOW_ROWS_APART["qwen2"], dtype))


def test_only_attention_that_skips_other_rows_is_given_them(monkeypatch):
    """What a model does with its attention is its own; what it is called decides."""
    apart, mixed = (
        scorer_of(name, {**KNOW_ROWS_APART, **DO_NOT}[name]) for name in ("qwen2", "opt")
    )
    assert not supports_packing(apart)
    for scorer in (apart, mixed):
        called = SimpleNamespace(_attn_implementation="flash_attention_2")
        monkeypatch.setattr(scorer, "lm", Called(scorer.lm, called))
    assert supports_packing(apart)
    assert not supports_packing(mixed)


def test_a_model_that_goes_on_counting_does_not_know_rows_apart(monkeypatch):
    """It sees nothing of the row before, and takes its own positions for those behind it."""
    scorer = scorer_of("gpt2", KNOW_ROWS_APART["gpt2"])
    embed = scorer.lm.transformer.wpe.forward
    monkeypatch.setattr(
        scorer.lm.transformer.wpe,
        "forward",
        lambda places: embed(torch.arange(places.shape[-1]).expand(places.shape)),
    )
    assert not keeps_rows_independent(scorer)


class Called(torch.nn.Module):
    """A model by another config."""

    def __init__(self, lm, config):
        super().__init__()
        self.lm, self.config = lm, config

    def get_decoder(self):
        return self.lm.get_decoder()

    def get_output_embeddings(self):
        return self.lm.get_output_embeddings()
