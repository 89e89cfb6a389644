"""A cache with room holds what a cache without it holds, and copies far less."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from klinic.sampler.kv_cache import (
    BLOCK,
    GROUPED,
    GrowingLayer,
    _grouped_sdpa,
    grouped_attention,
    make_growing_cache,
)

HEADS, SIZE = 2, 3


def room(length):
    return length - 1 + BLOCK


def states(rows, length, seed):
    made = torch.randn(2, rows, HEADS, length, SIZE, generator=torch.Generator().manual_seed(seed))
    return made[0], made[1]


def model(**config):
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            **config,
        )
    )


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_whatever_is_done_to_it_it_holds_what_the_layer_of_transformers_holds(data):
    ours, theirs = GrowingLayer(room), DynamicLayer()
    rows = 3
    for seed in range(data.draw(st.integers(1, 12))):
        length = data.draw(st.sampled_from([1, 1, 1, 5, BLOCK]))
        for one, other in zip(
            ours.update(*states(rows, length, seed)),
            theirs.update(*states(rows, length, seed)),
            strict=True,
        ):
            assert torch.equal(one, other)
        kept = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=6))
        ours.reorder_cache(torch.tensor(kept))
        theirs.reorder_cache(torch.tensor(kept))
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        assert ours.get_seq_length() == theirs.get_seq_length()
        rows = len(kept)


def test_a_token_is_written_behind_the_others_without_copying_them():
    layer = GrowingLayer(room)
    layer.update(*states(4, 10, 0))
    places = {layer.update(*states(4, 1, seed))[0].data_ptr() for seed in range(2 * BLOCK)}
    assert len(places) == 2


def test_a_row_that_ends_makes_place_for_the_last_and_the_others_stay_where_they_are():
    layer = GrowingLayer(room)
    layer.update(*states(4, 10, 0))
    keys, _ = layer.update(*states(4, 1, 1))
    place, expected = keys.data_ptr(), keys[[0, 3, 2]].clone()
    layer.reorder_cache(torch.tensor([0, 3, 2]))
    assert torch.equal(layer.keys, expected)
    assert layer.keys.data_ptr() == place


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_by_groups_is_attention(groups, masked):
    made = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 1, 8, generator=made)
    key, value = torch.randn(2, 3, groups, 7, 8, generator=made)
    mask = torch.ones(3, 1, 1, 7, dtype=torch.bool)
    mask[1, ..., :4] = False
    module = torch.nn.Module()
    module.num_key_value_groups = 4 // groups
    given_mask = mask if masked else None
    ours, _ = _grouped_sdpa(module, query, key, value, given_mask, scaling=0.7, dropout=0.0)
    theirs, _ = sdpa_attention_forward(module, query, key, value, given_mask, scaling=0.7)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_model_keeps_its_attention_also_when_its_forward_fails():
    decoder = model().get_decoder()
    seen = []

    def fail(*_, **__):
        seen.append(decoder.config._attn_implementation)
        raise ZeroDivisionError

    decoder.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError), grouped_attention(decoder):
        decoder(torch.ones(1, 1, dtype=torch.int64))
    assert seen == [GROUPED]
    assert decoder.config._attn_implementation == "sdpa"


def test_eager_attention_is_left_to_the_model():
    decoder = model(attn_implementation="eager").get_decoder()
    with grouped_attention(decoder):
        assert decoder.config._attn_implementation == "eager"


def test_layers_of_other_kinds_are_those_of_transformers():
    mixed = model(
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=4,
        use_sliding_window=True,
    )
    layers = make_growing_cache(mixed.get_decoder(), room).layers
    assert [type(layer) for layer in layers] == [GrowingLayer, DynamicSlidingWindowLayer]


@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own doings
def test_a_compiled_model_has_the_cache_that_it_can_be_compiled_with():
    decoder = model().get_decoder()
    decoder.compile(dynamic=True)
    assert {type(layer) for layer in make_growing_cache(decoder, room).layers} == {DynamicLayer}
    with grouped_attention(decoder):
        assert decoder.config._attn_implementation == "sdpa"
