"""A key-value cache with room to grow, and attention of one token over it.

transformers joins all keys and values anew for every token, and repeats them for every query head of
a group where there is padding. Here a token is written into room made beforehand, a row that has
ended makes place for the last one, and the query heads of a group share what they look at. Layers
of other kinds (sliding windows, states of linear attention) stay those of transformers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

BLOCK = 64  # tokens of room at a time: one in 64 copies what is there
SDPA, GROUPED = "sdpa", "klinic_grouped_sdpa"


def growing_cache(decoder: Any) -> DynamicCache:
    """Return an empty cache for a model."""
    cache = DynamicCache(config=decoder.config)
    if getattr(decoder, "_compiled_call_impl", None) is None:  # which would compile every length
        cache.layers = [
            GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
        ]
    return cache


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, at the beginning of larger tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._rooms: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write what is new behind what is there; return all of it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if not self._rooms or end > self._rooms[0].shape[-2]:
            self._rooms = [_with_room(told, end + BLOCK - 1) for told in (self.keys, self.values)]
        for room, states in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        self.keys, self.values = (room[:, :, :end] for room in self._rooms)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows in this order: in place, if those that move come from behind the rest."""
        num, length = len(beam_idx), self.keys.shape[-2]
        into = (beam_idx != torch.arange(num, device=beam_idx.device)).nonzero()[:, 0]
        out_of = beam_idx[into]
        if not self._rooms or bool((out_of < num).any()):
            super().reorder_cache(beam_idx)
            self._rooms = []
            return
        for room in self._rooms:
            room[into, :, :length] = room[out_of, :, :length]
        self._rooms = [room[:num] for room in self._rooms]
        self.keys, self.values = (room[:, :, :length] for room in self._rooms)


def _with_room(told: Tensor, length: int) -> Tensor:
    rows, heads, start, size = told.shape
    room = told.new_empty(rows, heads, length, size)
    room[:, :, :start] = told
    return room


@contextmanager
def grouped_attention(config: Any) -> Iterator[None]:
    """Let a model whose attention is PyTorch's look at keys and values without repeating them."""
    before = config._attn_implementation
    if before == SDPA:
        config._attn_implementation = GROUPED
    try:
        yield
    finally:
        config._attn_implementation = before


def _grouped_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **how: Any
) -> tuple[Tensor, None]:
    """Take the query heads of a group as so many queries; all see the same when there is one token.

    Anything else goes the way of transformers.
    """
    rows, heads, length, size = query.shape
    if length > 1 or heads == key.shape[1] or how.get("position_bias") is not None:
        told: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **how
        )
        return told
    groups = query.reshape(rows, key.shape[1], -1, size)
    seen = scaled_dot_product_attention(
        groups, key, value, attn_mask=attention_mask, scale=how.get("scaling")
    )
    return seen.reshape(rows, 1, heads, -1), None


AttentionInterface.register(GROUPED, _grouped_sdpa)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
