"""`model.attention`: the kernel that a recipe names is used, or is refused before loading."""

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from klinic.errors import ConfigError
from klinic.model import attention
from klinic.model.attention import refuse_missing_kernel, select_attention
from klinic.model.layout import pack_rows, pad_rows
from klinic.model.loading import check_log_probs, load_policy, load_scorer
from klinic.model.scorer import supports_packing
from klinic.recipe.loading import from_keywords
from klinic.recipe.sections import ModelSection

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS = [np.arange(3, 3 + length) for length in (9, 14, 5)]
PARTS = [row[:2] for row in ROWS], [row[2:] for row in ROWS]


def load(**section):
    return load_policy(ModelSection(name="tiny", **section), temperature=1.0, seed=0)


def scored(policy):
    return policy.scorer(pad_rows(*PARTS, pad_id=0, device=CPU)).logp


def test_auto_is_the_kernel_of_transformers_and_others_agree_with_it():
    plain = scored(load())
    assert load().lm.config._attn_implementation == "sdpa"
    assert torch.equal(scored(load(attention="sdpa")), plain)
    eager = load(attention="eager", lora_rank=2)
    assert eager.lm.config._attn_implementation == "eager"
    assert torch.allclose(scored(eager), plain, atol=1e-5)
    assert not supports_packing(eager.scorer)


def test_a_reference_from_another_path_has_the_kernel_of_the_policy():
    reference = load_scorer("tiny", like=load(attention="eager"), seed=0)
    assert reference.lm.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("kernel", "device", "dtype", "sentence"),
    [
        ("flash_attention_2", CPU, "bf16", "needs an NVIDIA or AMD GPU"),
        ("flash_attention_2", CUDA, "bf16", "flash-attn is not installed"),
        ("flex_attention", CPU, "fp32", "no backward pass on a device of type cpu"),
    ],
)
def test_a_kernel_that_is_not_there_is_refused(kernel, device, dtype, sentence):
    with pytest.raises(ConfigError, match=sentence):
        refuse_missing_kernel(kernel, device, dtype)


def test_flash_attention_needs_bf16(monkeypatch):
    monkeypatch.setattr(attention, "find_spec", lambda _: object())
    refuse_missing_kernel("flash_attention_2", CUDA, "bf16")
    with pytest.raises(ConfigError, match="computes in bf16"):
        refuse_missing_kernel("flash_attention_2", CUDA, "fp32")


def test_it_is_refused_before_a_model_is_loaded(tmp_path):
    section = ModelSection(name=str(tmp_path / "none"), attention="flex_attention", device="cpu")
    with pytest.raises(ConfigError, match=r"model\.attention"):
        load_policy(section, temperature=1.0, seed=0)


def test_a_model_that_ignores_the_kernel_is_refused():
    lm = load().lm
    lm.set_attn_implementation = lambda _: None
    with pytest.raises(ConfigError, match="does not support"):
        select_attention(lm, "eager", "tiny")


@pytest.mark.parametrize(
    "keys", [{"attn_implementation": "sdpa"}, {"model.attention": "sdpa"}], ids=str
)
def test_other_names_of_the_key(keys):
    assert from_keywords(model="tiny", task="arithmetic", **keys).recipe.model.attention == "sdpa"
    flash = from_keywords(model="tiny", task="arithmetic", flash_attn=True).recipe
    assert flash.model.attention == "flash_attention_2"
    with pytest.raises(ConfigError, match="several processes"):
        from_keywords(model="tiny", task="arithmetic", flash_attn=True, **{"learner.shards": 2})


@pytest.mark.slow  # torch compiles the kernel for two minutes
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flex_attention_scores_packed_rows_as_padded_ones_on_the_cpu():
    policy = load()
    plain = scored(policy).detach()
    select_attention(policy.lm, "flex_attention", "tiny")
    assert supports_packing(policy.scorer)
    with torch.no_grad():
        packed = policy.scorer(pack_rows(*PARTS, device=CPU)).logp
    assert (packed - plain).abs().max() < 1e-5


def attention_in_bf16_alone(module, query, key, value, mask, **how):
    """A kernel like flash attention: rounded by autocast, and no fp32 without it."""
    if not torch.is_autocast_enabled("cpu"):
        raise RuntimeError("only bf16")
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **how)


def test_fp32_passes_do_not_use_a_kernel_of_bf16_alone(monkeypatch):
    AttentionInterface.register("bf16_alone", attention_in_bf16_alone)
    AttentionMaskInterface.register("bf16_alone", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setattr(attention, "FLASH", "bf16_alone")
    monkeypatch.setattr(attention, "PACKED_KERNELS", ("bf16_alone",))
    policy = load(dtype="bf16")
    lm, ids = policy.lm, torch.arange(8)[None]
    lm.set_attn_implementation("bf16_alone")
    check_log_probs(policy.scorer, "tiny")
    assert lm.config._attn_implementation == "bf16_alone"
    with pytest.raises(RuntimeError, match="only bf16"):
        lm(input_ids=ids)
    attention.use_cpu_attention(lm)
    lm(input_ids=ids)
