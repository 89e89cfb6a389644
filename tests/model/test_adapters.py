"""Adapters of many kinds are loaded, trained further, frozen, merged and saved as what they are."""

import json
import pickle
import shutil
import warnings

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from klinic.errors import ConfigError
from klinic.learner.checkpoint import load_weights, save_model
from klinic.model.adapters import base_digest, policy_digest, starts_at_zero
from klinic.model.equivalence import MAX_LOGP_DIFFERENCE, largest_difference, probe_logp
from klinic.model.loading import load_merged_policy, load_policy, load_scorer
from klinic.model.reference import reference_at_start
from klinic.recipe.sections import ModelSection
from model.foreign import KINDS, move, policy_of, write_adapter, write_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module", params=KINDS)
def adapter(request, base):
    # tied heads are PEFT's warning to give, and klinic's to test
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return write_adapter(base.with_name(request.param), base, **KINDS[request.param])


def by_peft(adapter, base):
    """Return what PEFT itself makes of an adapter."""
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(lm, adapter).eval()


def logits(lm):
    with torch.no_grad():
        return lm(input_ids=torch.arange(5, 25)[None]).logits


def reference_log_probs(reference):
    with reference._active_adapter():
        return probe_logp(reference.scorer)


def test_every_kind_is_loaded_as_peft_means_it_and_can_be_trained(adapter, base):
    policy = policy_of(adapter)
    assert torch.equal(logits(policy.lm), logits(by_peft(adapter, base)))
    trained = {name for name, p in policy.lm.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name or ".modules_to_save." in name for name in trained)
    assert base_digest(policy.lm) == base_digest(policy_of(adapter).lm)


def test_the_reference_is_the_adapter_as_it_was_and_not_the_base(adapter):
    policy = policy_of(adapter)
    before, digest = probe_logp(policy.scorer), policy_digest(policy.lm)
    with policy.lm.disable_adapter():
        assert largest_difference(before, probe_logp(policy.scorer)) > 0.01
    num_trained = sum(p.requires_grad for p in policy.lm.parameters())
    reference = reference_at_start(policy.scorer, source=str(adapter))
    assert reference.kind == "adapter_frozen"
    assert reference.digest == digest == policy_digest(policy.lm)
    assert torch.equal(reference_log_probs(reference), before)
    move(policy)
    assert torch.equal(reference_log_probs(reference), before)
    assert largest_difference(probe_logp(policy.scorer), before) > 0.01
    assert sum(p.requires_grad for p in policy.lm.parameters()) == num_trained
    assert policy_digest(policy.lm) != digest


def test_every_kind_is_saved_for_peft_and_restored(adapter, base, tmp_path):
    policy = policy_of(adapter)
    reference_at_start(policy.scorer, source=str(adapter))
    move(policy)
    save_model(tmp_path / "model", policy)
    assert not (tmp_path / "model" / "reference").exists()
    assert torch.equal(logits(by_peft(tmp_path / "model", base)), logits(policy.lm))
    again = policy_of(adapter)
    reference_at_start(again.scorer, source=str(adapter))
    load_weights(tmp_path / "model", again)
    assert policy_digest(again.lm) == policy_digest(policy.lm)
    assert torch.equal(probe_logp(again.scorer), probe_logp(policy.scorer))


def test_every_kind_merges_into_a_whole_model_that_loads_again(adapter, tmp_path):
    whole = load_merged_policy(
        ModelSection(name=str(adapter), lora_rank=4), temperature=1.0, seed=0
    )
    assert all(p.requires_grad for p in whole.lm.parameters())
    expected = probe_logp(policy_of(adapter).scorer)
    assert largest_difference(probe_logp(whole.scorer), expected) < MAX_LOGP_DIFFERENCE
    save_model(tmp_path / "model", whole)
    assert torch.equal(probe_logp(policy_of(tmp_path / "model").scorer), probe_logp(whole.scorer))


def test_a_rank_puts_a_fresh_adapter_on_the_merged_one(base):
    adapter = write_adapter(base.with_name("before"), base)
    policy = policy_of(adapter, lora_rank=4)
    assert policy.lm.peft_config["default"].r == 4
    reference = reference_at_start(policy.scorer, source="start")
    assert reference.kind == "adapter_off"
    expected = probe_logp(policy_of(adapter).scorer)
    assert largest_difference(reference_log_probs(reference), expected) < MAX_LOGP_DIFFERENCE


def test_dropout_of_an_adapter_is_silenced_and_kept_in_its_config(base, tmp_path):
    policy = policy_of(write_adapter(tmp_path / "a", base, lora_dropout=0.5))
    reference_at_start(policy.scorer, source="a")
    assert torch.equal(probe_logp(policy.scorer), probe_logp(policy.scorer))
    save_model(tmp_path / "b", policy)
    assert json.loads((tmp_path / "b" / "adapter_config.json").read_text())["lora_dropout"] == 0.5


@pytest.mark.parametrize(
    ("config", "zero"),
    [({}, True), ({"use_dora": True}, False), ({"modules_to_save": ["norm"]}, False)],
)
def test_only_plain_matrices_that_end_in_zeros_are_known_to_add_nothing(
    base, tmp_path, config, zero
):
    adapter = write_adapter(tmp_path / "a", base, by=0.0, **config)
    policy = policy_of(adapter)
    assert starts_at_zero(policy.lm) == zero
    expected = "adapter_off" if zero else "adapter_frozen"
    assert reference_at_start(policy.scorer, source="a").kind == expected


def test_one_weight_that_is_not_zero_is_seen(base):
    policy = policy_of(base, lora_rank=2)
    assert starts_at_zero(policy.lm)
    with torch.no_grad():
        dict(policy.lm.named_parameters())[
            "base_model.model.model.layers.3.mlp.down_proj.lora_B.default.weight"
        ][0, 0] = 1e-7
    assert not starts_at_zero(policy.lm)


def test_an_adapter_brings_its_chat_template_along(base, tmp_path):
    adapter = write_adapter(tmp_path / "a", base)
    tokenizer = policy_of(base).tokenizer
    assert policy_of(adapter).tokenizer.chat_template == tokenizer.chat_template
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(adapter)
    assert policy_of(adapter).tokenizer.chat_template == "{{ messages }}"


def test_an_adapter_may_be_the_reference_of_another_model(base, tmp_path):
    adapter = write_adapter(tmp_path / "a", base)
    policy = policy_of(base)
    scorer = load_scorer(str(adapter), like=policy, seed=0)
    assert torch.equal(probe_logp(scorer), probe_logp(policy_of(adapter).scorer))


def test_an_adapter_finds_its_base_from_anywhere_and_after_a_move(base, tmp_path, monkeypatch):
    shutil.copytree(base, tmp_path / "run" / "start")
    monkeypatch.chdir(tmp_path)
    policy = load_policy(ModelSection(name="run/start", lora_rank=2), temperature=1.0, seed=0)
    move(policy)
    save_model(tmp_path / "run" / "model", policy)
    expected = probe_logp(policy.scorer)
    monkeypatch.chdir("/")
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert torch.equal(logits(theirs), logits(policy.lm))
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert torch.equal(probe_logp(policy_of(tmp_path / "moved" / "model").scorer), expected)


def change(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"bias": "all"}, "bias is all"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "megatron_config is"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
        ({"revision": "v2"}, "revision is v2"),
        ({"from_the_future": 3}, "from_the_future is 3"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is loftq"),
        ({"base_model_name_or_path": None}, "does not name its base model"),
        ({"base_model_name_or_path": "./gone"}, "there is no such folder"),
        ({"base_model_name_or_path": "."}, "is itself an adapter"),
        ({"r": "many"}, "cannot be loaded"),
        ({"r": 3}, "cannot be loaded"),
        ({"target_modules": ["nothing"]}, "cannot be loaded"),
        ({"target_modules": ["q_proj"]}, "tensors that its config does not describe"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "lacks 8 tensors, such as"),
    ],
)
def test_what_klinic_does_not_know_is_refused(base, tmp_path, monkeypatch, changes, message):
    adapter = write_adapter(tmp_path / "a", base)
    change(adapter, **changes)
    monkeypatch.chdir(adapter)
    with pytest.raises(ConfigError, match=message):
        policy_of(adapter)


def test_a_pickle_is_never_opened(base, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was opened",))

    adapter = write_adapter(tmp_path / "a", base)
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        policy_of(adapter)


def test_weights_of_the_base_inside_an_adapter_are_refused(base, tmp_path):
    adapter = write_adapter(tmp_path / "a", base)
    file = adapter / "adapter_model.safetensors"
    embedding = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    surplus = {"base_model.model.model.embed_tokens.weight": embedding + 1}
    save_file(load_file(file) | surplus, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="holds 1 tensors that its config does not describe"):
        policy_of(adapter)


def test_a_merge_that_changes_the_head_as_well_is_refused(base, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = write_adapter(tmp_path / "a", base, target_modules=["embed_tokens"])
        assert policy_of(adapter)
        with pytest.raises(ConfigError, match="it adapts an embedding that is tied to the head"):
            policy_of(adapter, lora_rank=2)


def test_an_adapter_covers_the_layers_that_a_recipe_names():
    named = {"name": "tiny", "lora_rank": 2, "lora_target_modules": ("q_proj", "v_proj")}
    policy = load_policy(ModelSection(**named), temperature=1.0, seed=0)
    trained = [name for name, p in policy.lm.named_parameters() if p.requires_grad]
    assert {name.split(".")[-4] for name in trained} == {"q_proj", "v_proj"}


def test_a_layer_that_the_model_lacks_is_refused_with_those_it_has():
    named = {"name": "tiny", "lora_rank": 2, "lora_target_modules": ("c_attn",)}
    with pytest.raises(ConfigError, match=r"c_attn: the model has no such layer.*q_proj, k_proj"):
        load_policy(ModelSection(**named), temperature=1.0, seed=0)
