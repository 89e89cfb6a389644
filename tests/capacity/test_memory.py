"""Without weights, a step takes what torch's own allocator counts when it is taken with them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from allocated_memory import allocated_peak_of
from klinic.capacity.memory import Phase, memory_per_device, peak_by_phase
from klinic.capacity.meta_policy import build_meta_policy, is_config_reachable, tensor_classifier
from klinic.capacity.meta_tensors import CPU, META, MemoryMeter, MetaTensor, replace_by_meta_tensors
from klinic.errors import ConfigError
from klinic.learner.protocol import LossScales
from klinic.model.layout import pad_rows
from klinic.model.tiny import tiny_model, tiny_tokenizer
from klinic.recipe.sections import ModelSection
from tiny_policies import batch_of, learner_of, own_reference, rollouts, small_model, small_policy

BUFFER = {"fp32": 0, "bf16": 2**17}  # bytes that attention takes for itself, at any size
GIB = 2**30
SHAPES = Path(__file__).parents[2] / "recipes" / "shapes"


def llama(num_hidden_layers=3):
    config = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": num_hidden_layers}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
    special = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    vocabulary = len(tiny_tokenizer())
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **config, **heads, **special))


MODELS = {
    "gpt2": lambda: small_model(n_embd=64, n_layer=3, n_head=4),
    "qwen3": lambda: tiny_model(tiny_tokenizer(), seed=0),
    "llama": llama,
}


def step_of(policy, reference, taken):
    """Return what scoring, preparing and committing take, one after the other."""
    learner = learner_of(policy, reference, micro_batch_size=6)
    record = batch_of(rollouts(), step=1)
    score, scored = taken(lambda: learner.score(record, needs_reference=True))
    prepare, _ = taken(lambda: learner.prepare(scored, LossScales(kl_coef=0.1)))
    commit, _ = taken(learner.commit)
    return {"score": score, "prepare": prepare, "commit": commit}


@pytest.mark.parametrize(
    "section",
    [
        {},
        pytest.param({"dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"lora_rank": 4}, marks=pytest.mark.slow),
        {"lora_rank": 4, "gradient_checkpointing": True, "dtype": "bf16"},
    ],
    ids=lambda section: " ".join(section) or "full",
)
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[] if name == "qwen3" else pytest.mark.slow) for name in MODELS],
)
def test_a_step_without_weights_takes_what_the_allocator_counts(architecture, section):
    def parts():
        policy = small_policy(model=MODELS[architecture](), **section)
        return policy, own_reference(policy, "lora_rank" in section)

    counted = step_of(*parts(), allocated_peak_of)
    policy, reference = parts()
    meter = MemoryMeter(tensor_classifier(policy.lm))
    replace_by_meta_tensors(policy.lm, meter)
    if reference.kind == "copy":
        replace_by_meta_tensors(reference.scorer.lm, meter)

    def predicted(act):
        meter.reset_peak()
        before = meter.live.total()
        result = act()
        return meter.peak.total() - before, result

    buffer = BUFFER[section.get("dtype", "fp32")]
    for name, taken in step_of(policy, reference, predicted).items():
        assert taken == pytest.approx(counted[name], rel=0.03, abs=buffer), name


def kept_by_forward(num_layers, **section):
    """Return the bytes that autograd keeps for a backward pass, and of how many tokens."""
    rows = [np.zeros(20, dtype=np.int64)] * 3
    layout = pad_rows([ids[:8] for ids in rows], [ids[8:] for ids in rows], pad_id=0, device=CPU)
    policy = small_policy(model=llama(num_hidden_layers=num_layers), **section)
    meter = MemoryMeter(tensor_classifier(policy.lm))
    replace_by_meta_tensors(policy.lm, meter)
    before = meter.live.total()
    scores = policy.scorer(layout)
    assert scores.logp.requires_grad
    return meter.live.total() - before, layout.input_ids.numel()


@pytest.mark.parametrize(
    ("checkpointing", "numbers"),
    [(False, 8 * 96 + 2 * 32 + 4 * 256 + 6 + 2), (True, 96)],
)
def test_a_llama_layer_keeps_what_the_page_says(checkpointing, numbers):
    less, num_tokens = kept_by_forward(2, gradient_checkpointing=checkpointing)
    more, _ = kept_by_forward(5, gradient_checkpointing=checkpointing)
    assert (more - less) / num_tokens == 3 * numbers * 4


def test_parameters_are_counted_from_a_config_alone():
    shape = str(SHAPES / "qwen2.5-7b-instruct")
    whole = build_meta_policy(ModelSection(name=shape), temperature=1.0, tied_to=False)
    assert whole.num_parameters == whole.num_trainable == 7_615_616_512
    assert whole.meter.live["weights"] >= 4 * 7_615_616_512
    adapted = build_meta_policy(
        ModelSection(name=shape, lora_rank=16), temperature=1.0, tied_to=True
    )
    assert adapted.num_parameters - adapted.num_trainable == 7_615_616_512
    assert adapted.num_trainable == 40_370_176
    assert adapted.reference.kind == "adapter_off"
    assert adapted.meter.live["reference"] == 0


def test_a_reference_costs_a_copy_of_what_is_tied_to():
    section = ModelSection(name="tiny")
    alone, tied = (
        build_meta_policy(section, temperature=1.0, tied_to=tied) for tied in (False, True)
    )
    assert alone.reference is None
    assert alone.meter.live["reference"] == 0
    assert tied.meter.live["reference"] == tied.meter.live["weights"]
    shared = tied.policy.lm
    assert shared.get_input_embeddings().weight is shared.get_output_embeddings().weight
    other = build_meta_policy(section, temperature=1.0, tied_to=str(SHAPES / "qwen2.5-7b-instruct"))
    assert other.meter.live["reference"] > 4 * 7_615_616_512


def test_a_saved_adapter_is_counted_twice_where_it_is_its_own_reference(tmp_path):
    policy = small_policy(lora_rank=4)
    small_model().save_pretrained(tmp_path / "base")
    policy.lm.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    policy.lm.save_pretrained(tmp_path / "adapter")
    section = ModelSection(name=str(tmp_path / "adapter"))
    alone, tied = (
        build_meta_policy(section, temperature=1.0, tied_to=tied) for tied in (False, True)
    )
    adapter = sum(p.numel() for p in policy.lm.parameters() if p.requires_grad)
    assert alone.num_trainable == tied.num_trainable == adapter
    assert tied.num_parameters == alone.num_parameters + adapter
    assert tied.reference.kind == "adapter_frozen"


def test_a_folder_without_a_model_is_refused_and_a_hub_that_is_away_is_not(tmp_path):
    assert is_config_reachable("tiny")
    assert is_config_reachable(str(tmp_path))
    assert not is_config_reachable("nobody/has-this-model")
    with pytest.raises(ConfigError, match=r"config\.json"):
        build_meta_policy(ModelSection(name=str(tmp_path)), temperature=1.0, tied_to=False)


def test_memory_is_counted_until_it_is_freed_and_views_have_none():
    meter = MemoryMeter(lambda _: "made")
    with meter.count_as("given"):
        given = MetaTensor(torch.empty(10, 4, device=META), meter)
    double = given.double()
    assert dict(meter.live) == {"given": 160, "made": 320}
    seen = double.t()[1:].reshape(-1)[:1]  # a view, a copy of 240 bytes, and a view of it
    assert meter.live["made"] == 320 + 240
    del double
    assert meter.live["made"] == 240
    meter.reset_peak()
    assert meter.peak == meter.live
    del seen
    assert dict(+meter.live) == {"given": 160}


def test_a_number_that_is_not_there_reads_as_1_and_a_truth_as_false():
    meter = MemoryMeter(lambda _: "made")
    tensor = MetaTensor(torch.empty(2, device=META), meter)
    assert float(tensor.sum()) == 1.0
    assert not (tensor > 0).any()
    assert tensor.tolist() == [0.0, 0.0]


def test_the_highest_of_each_phase_stays():
    low, high = (Phase(name="updating", num_bytes={"weights": n}) for n in (1, 2))
    scoring = Phase(name="scoring", num_bytes={"weights": 3, "logits": 0})
    assert peak_by_phase([high, scoring, low]) == (scoring, high)
    assert scoring.num_bytes == {"weights": 3}


def test_what_no_tensor_shows_is_reserved():
    updating = Phase(name="updating", num_bytes={"weights": 10 * GIB, "logits": 2 * GIB})
    scoring = Phase(name="scoring", num_bytes={"weights": 10 * GIB})
    how = {"memory": 16 * GIB, "num_parameters": 25, "engine_sleeps": False}
    one = memory_per_device([updating, scoring], num=1, **how)
    assert one.phase is updating
    assert set(one.allowance) == {"CUDA context", "fragmentation"}
    assert one.free_bytes == 16 * GIB - 12 * GIB - sum(one.allowance.values())
    assert one.sampler_weight_bytes == 50
    two = memory_per_device([updating, scoring], num=2, **how)
    assert one.free_bytes - two.free_bytes == two.allowance["NCCL buffers"]
    assert one.engine_bytes == one.free_bytes
    asleep = memory_per_device([updating, scoring], num=1, **how | {"engine_sleeps": True})
    assert asleep.engine_bytes - one.engine_bytes == 2 * GIB  # the logits are gone when it wakes
    small = memory_per_device([updating], num=1, **how | {"memory": 8 * GIB})
    assert small.free_bytes < 0
    assert small.sampler_fraction == 0.0
