"""The arithmetic of scale: by hand, against torch's own count, and against what is really sent."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from klinic.capacity import bytes_moved
from klinic.capacity.flops import (
    DecoderShape,
    Flop,
    StepSizes,
    causal_pairs,
    decoder_shape,
    dense_shape,
    forward_flops,
    step_flops,
    training_flops,
)
from klinic.capacity.throughput import (
    Accelerator,
    best_split,
    checkpointed_bytes,
    ideal_sync_seconds,
    learner_time,
    max_parallel_rows,
    min_engine_devices,
    min_learner_devices,
    sampling_seconds,
    startup_bytes,
    sync_seconds,
)
from klinic.evidence.record import TOKEN_FIELDS, EmittedBy
from klinic.evidence.rollout import Prompt, Rollout, Segment
from klinic.evidence.store import part_name, write_part
from klinic.learner.packing import split_rows
from klinic.learner.protocol import LossScales
from klinic.learner.row_shares import NARROWED, encode_share, share_of_rank
from klinic.model.layout import pad_rows
from klinic.model.loading import num_parameters
from klinic.model.tiny import tiny_tokenizer
from tiny_policies import batch_of, drifted_reference, learner_of, rollouts, small_policy

CPU = torch.device("cpu")
LLAMA_8B = dense_shape(
    num_layers=32, hidden=4096, inner=14336, heads=(32, 8, 128), vocabulary=128256
)
LLAMA_1B = dense_shape(
    num_layers=16, hidden=2048, inner=8192, heads=(32, 8, 64), vocabulary=128256, tied=True
)
SIZES = StepSizes(
    prompts=16,
    group=8,
    prompt_length=100,
    completion_length=900,
    reference=True,
    split_gradient_fraction=0.1,
)
H100 = Accelerator()


def llama():
    config = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
    special = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    vocabulary = len(tiny_tokenizer())
    # whose products torch counts, all pairs of them
    plain = {"attn_implementation": "eager"}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocabulary, **config, **heads, **special, **plain)
    )


def test_parameters_are_those_of_published_models():
    assert LLAMA_1B.num_parameters == 1_235_814_400
    assert LLAMA_8B.num_parameters == 8_030_261_248
    largest = dense_shape(
        num_layers=126, hidden=16384, inner=53248, heads=(128, 8, 128), vocabulary=128256
    )
    assert largest.num_parameters == 405_853_388_800


@pytest.mark.parametrize("section", [{}, {"lora_rank": 4}], ids=["full", "lora"])
def test_a_shape_is_read_off_a_model(section):
    lm = small_policy(model=llama(), **section).lm
    counts = num_parameters(lm)
    shape = decoder_shape(lm, **counts)
    vocabulary = len(tiny_tokenizer())
    whole = dense_shape(
        num_layers=3, hidden=96, inner=256, heads=(6, 2, 16), vocabulary=vocabulary, tied=False
    )
    adapters = counts["num_trainable"] if section else 0
    assert shape.num_parameters == whole.num_parameters + adapters
    assert shape.num_layer_parameters == whole.num_layer_parameters + adapters
    assert shape.kv_entries_per_token == whole.kv_entries_per_token == 2 * 3 * 2 * 16
    assert shape.trains_all is not bool(section)


class NoModules(nullcontext):
    """Counting by module hangs hooks on them that `torch.autograd.grad` does not run with."""

    parents = frozenset({"Global"})


def rows_of(num, prompt, completion):
    ids = [np.full(prompt + completion, 3)] * num
    return pad_rows(
        [row[:prompt] for row in ids], [row[prompt:] for row in ids], pad_id=0, device=CPU
    )


@pytest.mark.parametrize("along_the_row", [False, True])
@pytest.mark.parametrize(
    ("section", "apart"),
    [({}, 0.01), ({"gradient_checkpointing": True}, 0.07), ({"lora_rank": 2}, 0.06)],
    ids=["full", "checkpointing", "lora"],
)
def test_products_are_those_that_torch_counts(section, apart, along_the_row):
    policy = small_policy(model=llama(), **section)
    shape = decoder_shape(policy.lm, **num_parameters(policy.lm))
    policy.scorer.chunk_elements = 8 * shape.vocabulary  # several chunks, as a real one has
    sizes = StepSizes(
        prompts=1,
        group=4,
        prompt_length=8,
        completion_length=16,
        checkpointing="gradient_checkpointing" in section,
        couples_row_tokens=along_the_row,
    )
    layout = rows_of(4, 8, 16)
    # pairs that eager attention makes too
    masked = shape.attention_flops(4 * (24**2 - causal_pairs(24)))
    with torch.no_grad(), FlopCounterMode(display=False) as forward:
        policy.scorer(layout)
    assert forward_flops(shape, sizes).total_flops + masked == pytest.approx(
        forward.get_total_flops(), rel=apart
    )
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = NoModules()
    with counter as update:
        policy.scorer.score_and_loss(
            layout, None, lambda scores, _: scores.logp.sum(), token_by_token=not along_the_row
        )[1].backward()
    again = 4 if sizes.checkpointing else 3
    expected = training_flops(shape, sizes).total_flops + again * masked
    assert expected == pytest.approx(update.get_total_flops(), rel=apart)


def test_a_step_by_hand():
    shape = DecoderShape(
        num_parameters=130,
        num_trained=130,
        num_layer_parameters=100,
        num_layers=1,
        hidden=3,
        query_heads=1,
        key_heads=1,
        head_size=2,
        vocabulary=5,
    )
    sizes = StepSizes(prompts=1, group=2, prompt_length=1, completion_length=2, reference=True)
    work = step_flops(shape, sizes)
    # 2 rows of 3 tokens: 200 each, and 6 pairs of 8 each; 4 tokens with a head of 30 each
    assert forward_flops(shape, sizes) == Flop(layers=2 * (3 * 200 + 6 * 8), head=4 * 30)
    assert work.updating == Flop(layers=3 * 2 * (3 * 200 + 6 * 8), head=3 * 4 * 30)
    # the exact KL of one row in two, policy and reference
    assert work.reference == Flop(layers=2 * (3 * 200 + 6 * 8), head=4 * 30 + 4 * 30)
    assert work.reading == Flop(layers=200 + 8, head=30)
    assert work.sampling == Flop(layers=2 * (2 * 200 + 5 * 8), head=4 * 30)
    assert work.scoring == work.apart == Flop()


def test_adapters_save_the_gradient_of_what_is_under_them():
    adapted = replace(LLAMA_8B, num_trained=10**7)
    full, thin = (training_flops(shape, SIZES) for shape in (LLAMA_8B, adapted))
    assert thin.head == 2 / 3 * full.head
    assert 2 / 3 < thin.layers / full.layers < 0.7


def test_the_whole_vocabulary_asks_the_reference_in_every_update():
    sampled = replace(SIZES, updates=2)
    whole = replace(sampled, whole_vocabulary=True)
    forward = forward_flops(LLAMA_8B, SIZES)
    assert step_flops(LLAMA_8B, whole).reference.layers == 3 * forward.layers
    assert step_flops(LLAMA_8B, sampled).reference.layers == forward.layers


counts = st.integers(1, 64)


@given(prompts=counts, more=counts, group=st.integers(2, 16), new=st.integers(1, 4096))
def test_work_adds_up_over_prompts_and_grows_with_length(prompts, more, group, new):
    def work(num, length=new):
        sizes = replace(SIZES, prompts=num, group=group, completion_length=length)
        return step_flops(LLAMA_1B, sizes)

    both = work(prompts).total_flops.total_flops + work(more).total_flops.total_flops
    assert work(prompts + more).total_flops.total_flops == pytest.approx(both)
    assert work(prompts, new + 1).total_flops.total_flops > work(prompts).total_flops.total_flops
    # without a KL exactly what it adds is gone
    free = replace(
        SIZES,
        prompts=prompts,
        group=group,
        completion_length=new,
        reference=False,
        split_gradient_fraction=0.0,
    )
    tied = work(prompts)
    left = tied.learning.total_flops - tied.kl.total_flops
    assert step_flops(LLAMA_1B, free).learning.total_flops == pytest.approx(left)


def test_bytes_of_a_token_are_those_of_its_columns():
    record = batch_of(rollouts())
    policy = small_policy()
    learner = learner_of(policy, drifted_reference(policy))
    done = learner.prepare(
        learner.score(record, needs_reference=True), LossScales(kl_coef=0.1)
    ).record
    for name, size in {
        **bytes_moved.SENT_TOKEN_BYTES,
        **bytes_moved.RESULT_TOKEN_BYTES,
        **bytes_moved.REFERENCE_TOKEN_BYTES,
    }.items():
        array = getattr(done, name)
        if name in NARROWED:
            array = array.astype(np.int32)
        assert size == (1 / 8 if array.dtype == np.bool_ else array.dtype.itemsize), name
    sent = {name for name in TOKEN_FIELDS if getattr(record, name) is not None}
    assert sent == set(bytes_moved.SENT_TOKEN_BYTES)


def equal_rollouts(sizes):
    """Return random completions that are all of the same length."""
    stream = np.random.default_rng(0)

    def said():
        num = sizes.completion_length
        logp = -stream.exponential(size=num).astype(np.float32)
        ids = stream.integers(3, 50, num)
        by = EmittedBy.POLICY
        return Segment(token_ids=ids, emitted_by=by, logp_sampler=logp, weight_version=0)

    made = []
    for index in range(sizes.prompts):
        ids = stream.integers(3, 50, sizes.prompt_length)
        prompt = Prompt(index=index, text="", token_ids=ids, columns={})
        made += [
            Rollout(prompt=prompt, sample=k, segments=(said(),), finish_reason="stop", text="")
            for k in range(sizes.group)
        ]
    return made


def test_a_record_on_the_wire_has_the_bytes_that_are_computed():
    few = StepSizes(prompts=4, group=8, prompt_length=10, completion_length=40)
    many = replace(few, prompts=32)

    def bytes_of_rows(sizes):
        record = batch_of(equal_rollouts(sizes))
        row_sets = split_rows(record, size=8, num_ranks=2)
        shares = [share_of_rank(record, row_sets, rank=rank, num_ranks=2) for rank in range(2)]
        return sum(len(encode_share(share)) for share in shares)

    sent = [bytes_of_rows(sizes) for sizes in (few, many)]
    expected = bytes_moved.sent_bytes(many) - bytes_moved.sent_bytes(few)
    assert sent[1] - sent[0] == pytest.approx(expected, rel=0.02)
    assert sent[0] - bytes_moved.sent_bytes(few) < 7000  # names and types of the columns, twice


def test_a_record_on_disk_has_the_bytes_that_are_computed(tmp_path):
    sizes = StepSizes(prompts=16, group=8, prompt_length=10, completion_length=40, reference=True)
    policy = small_policy()
    learner = learner_of(policy, drifted_reference(policy))
    scored_ = learner.score(batch_of(equal_rollouts(sizes)), needs_reference=True)
    write_part(tmp_path, learner.prepare(scored_, LossScales(kl_coef=0.1)).record, 0)
    (file,) = tmp_path.rglob(part_name(0))
    shape = decoder_shape(policy.lm, **num_parameters(policy.lm))
    assert file.stat().st_size == pytest.approx(bytes_moved.stored_bytes(shape, sizes), rel=0.1)


def test_shards_are_passed_round_once_a_pass():
    sizes = replace(SIZES, micro_batch=8, split_gradient_fraction=0.0)  # 128 rows
    ends = LLAMA_1B.num_parameters - LLAMA_1B.num_layer_parameters
    layers = 2 * LLAMA_1B.num_layer_parameters  # in bf16
    head = 4 * LLAMA_1B.hidden * LLAMA_1B.vocabulary
    assert bytes_moved.gathered_bytes(LLAMA_1B, sizes, num=1) == 0
    # reference, forward and backward pass; the reference's head for the exact KL; the gradient
    step = 3 * layers + 2 * 4 * ends + head + 4 * LLAMA_1B.num_parameters
    assert bytes_moved.gathered_bytes(LLAMA_1B, sizes, num=16) == pytest.approx(step * 15 / 16)
    assert bytes_moved.gathered_bytes(LLAMA_1B, sizes, num=4) == pytest.approx(
        (4 * step - 3 * head) * 3 / 4  # the head of scoring is gathered once
    )
    # an adapter's reference has the policy's head, which is gathered
    adapted = replace(LLAMA_1B, num_trained=0)
    assert bytes_moved.gathered_bytes(adapted, sizes, num=16) == pytest.approx(
        (3 * layers + 2 * 4 * ends) * 15 / 16
    )


def test_an_engine_holds_its_weights_in_half_of_its_memory():
    assert min_engine_devices(LLAMA_8B, H100) == 1  # 16 GB of 36
    assert min_engine_devices(LLAMA_8B, replace(H100, memory=32e9)) == 2
    # 72 GB less 16.06, over 128 KiB x 1,000 tokens
    assert max_parallel_rows(LLAMA_8B, SIZES, H100, num=1) == int((72e9 - 16060522496) // 131072e3)
    assert min_learner_devices(LLAMA_8B, H100, reference=True) == 5  # 20 bytes a weight over 40 GB
    assert min_learner_devices(LLAMA_8B, H100, reference=False) == 4


def test_few_rows_are_drawn_at_the_speed_of_memory_and_many_at_that_of_products():
    one = replace(SIZES, prompts=1, group=2)
    tokens = one.completion_length
    moved = 2 * (LLAMA_8B.num_parameters + 2 * LLAMA_8B.kv_entries_per_token * 550)
    reading = step_flops(LLAMA_8B, one).reading.total_flops / 4e14
    expected = reading + tokens * moved / 3.35e12
    assert sampling_seconds(LLAMA_8B, one, H100, num=1) == pytest.approx(expected)
    fast = replace(H100, bandwidth=1e18, memory=1e15)
    many = replace(SIZES, prompts=4096)
    work = step_flops(LLAMA_8B, many)
    whole = (work.reading.total_flops + work.sampling.total_flops) / 4e14
    assert sampling_seconds(LLAMA_8B, many, fast, num=1) == pytest.approx(whole)


def test_what_does_not_fit_takes_for_ever():
    assert sampling_seconds(LLAMA_8B, SIZES, replace(H100, memory=16e9), num=1) == float("inf")
    assert best_split(LLAMA_8B, SIZES, H100, num=5) is None


@given(num=st.integers(6, 200))
def test_a_division_uses_all_and_more_accelerators_are_never_slower(num):
    def slower(found):
        return max(found.sampling, found.learning.total_seconds)

    here, there = (best_split(LLAMA_8B, SIZES, H100, num=n) for n in (num, num + 1))
    assert here.samplers + here.learners == num
    assert here.learners >= min_learner_devices(LLAMA_8B, H100, reference=True)
    assert slower(there) <= slower(here) * (1 + 1e-9)


def test_the_head_is_slow_since_it_is_fp32():
    learnt = learner_time(LLAMA_1B, SIZES, H100, num=1)
    fast = learner_time(LLAMA_1B, SIZES, replace(H100, flops_fp32=1e15), num=1)
    assert learnt.computing > 2 * fast.computing
    assert learnt.gathering == 0


def test_a_row_keeps_the_inputs_of_its_layers():
    # tests/capacity/test_memory.py holds autograd to `hidden` numbers a token and layer
    assert checkpointed_bytes(LLAMA_8B, SIZES) == 4 * 4096 * 32 * 1000


def test_a_sync_goes_through_one_process():
    num_bytes = bytes_moved.sync_bytes(LLAMA_8B, 2)
    assert num_bytes == 2 * 8_030_261_248
    assert sync_seconds(num_bytes, H100) == pytest.approx(2 * num_bytes / 5e10)
    assert ideal_sync_seconds(LLAMA_8B, H100, num=10) == pytest.approx(num_bytes / 10 / 5e10)


def test_a_start_holds_whole_copies():
    weights = 4 * LLAMA_8B.num_parameters
    assert startup_bytes(LLAMA_8B, reference=True, processes=8) == 16 * weights
    assert startup_bytes(LLAMA_8B, reference=False, processes=8) == 8 * weights
    adapted = replace(LLAMA_8B, num_trained=1)
    assert startup_bytes(adapted, reference=True, processes=8) == 8 * weights
