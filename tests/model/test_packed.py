"""Rows that lie end to end: as if alone, in models that know them apart; others are refused."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from klinic.errors import ConfigError
from klinic.model.layout import end_to_end, lay_out
from klinic.model.packed import refuse_mixed_rows
from klinic.model.scorer import TokenScorer

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
    refuse_mixed_rows(scorer, name)
    packed = scorer(end_to_end(*rows(), device=CPU)).logp
    apart = scorer(lay_out(*rows(), pad_id=0, device=CPU)).logp
    assert (packed - apart).abs().max() < 1e-10


@pytest.mark.parametrize("name", DO_NOT)
def test_a_model_that_mixes_rows_is_refused(name):
    with pytest.raises(ConfigError, match=r"learner\.packed is true.*does not know rows apart"):
        refuse_mixed_rows(scorer_of(name, DO_NOT[name]), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_reason_to_refuse(dtype):
    refuse_mixed_rows(scorer_of("qwen2", KNOW_ROWS_APART["qwen2"], dtype), "qwen2")
