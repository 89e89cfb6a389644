"""A model is loaded as a policy only if its log-probs can be trusted."""

import pytest
import torch
from torch import nn
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

from klinic.errors import ConfigError
from klinic.learner.checkpoint import save_model
from klinic.model.loading import load_policy, stop_ids
from klinic.model.tiny import tiny_tokenizer
from klinic.recipe.sections import ModelSection
from tiny_policies import small_model, small_policy

SHAPE = {
    "vocab_size": len(tiny_tokenizer()),
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}


def test_dropout_is_off_and_training_mode_is_on():
    policy = small_policy()
    assert policy.lm.training
    rates = [m.p for m in policy.lm.modules() if isinstance(m, nn.Dropout)]
    assert len(rates) > 5
    assert set(rates) == {0.0}


def test_a_model_that_is_random_is_refused():
    model = small_model()

    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

    model.transformer.h[0].mlp.act = Noisy()
    with pytest.raises(ConfigError, match="scored twice differ"):
        small_policy(model=model)


def test_a_head_that_does_more_than_klinic_knows_is_refused():
    model = small_model()
    model.register_forward_hook(lambda _m, _i, output: setattr(output, "logits", output.logits * 2))
    with pytest.raises(ConfigError, match="differ from its output embedding"):
        small_policy(model=model)


@pytest.mark.parametrize(
    "model",
    [
        lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=16, final_logit_softcapping=0.02)),
        lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.3)),
    ],
)
def test_soft_caps_and_scales_are_repeated(model):
    assert small_policy(model=model()).scorer is not None


def test_every_end_of_sequence_is_found():
    model, tokenizer = small_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [7, 1]
    model.config.eos_token_id = 9
    assert stop_ids(model, tokenizer, "small") == (1, 7, 9)


def test_a_saved_policy_loads_again_with_the_same_bits(tmp_path):
    policy = small_policy()
    save_model(tmp_path / "m", policy)
    again = load_policy(ModelSection(name=str(tmp_path / "m")), temperature=1.0, seed=1)
    for a, b in zip(policy.lm.parameters(), again.lm.parameters(), strict=True):
        assert torch.equal(a, b)
    assert again.eos_ids == policy.eos_ids


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_a_folder_that_is_not_there_is_named(name):
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_policy(ModelSection(name=name), temperature=1.0, seed=0)


def test_a_folder_without_a_model_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_policy(ModelSection(name=str(tmp_path)), temperature=1.0, seed=0)
