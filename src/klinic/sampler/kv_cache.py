"""A preallocated KV cache, and attention of a single token over it.

transformers concatenates all keys and values for every token and, with padding, repeats them for
every query head. This cache writes each token into preallocated space, moves the last row into the
slot of a finished one, and lets the query heads of a group share their keys and values. Other layer
types (sliding windows, linear attention) keep the cache of transformers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

BLOCK = 64  # tokens allocated at a time: only one token in 64 copies the cache
AllocationRule = Callable[[int], int]  # required length to the length to allocate
SDPA, GROUPED = "sdpa", "klinic_grouped_sdpa"


def make_growing_cache(decoder: Any, allocation: AllocationRule) -> DynamicCache:
    """Return an empty cache for a model."""
    cache = DynamicCache(config=decoder.config)
    if decoder._compiled_call_impl is None:  # a compiled model would recompile for every length
        plain = DynamicLayer
        cache.layers = [
            GrowingLayer(allocation) if type(one) is plain else one for one in cache.layers
        ]
    return cache


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, stored as prefixes of larger tensors."""

    def __init__(self, allocation: AllocationRule) -> None:
        super().__init__()
        self._allocation, self._buffers = allocation, dict[str, Tensor]()

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Append new keys and values; return all of them."""
        if not self.is_initialized:
            return super().update(key_states, value_states)
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        for name, states in (("keys", key_states), ("values", value_states)):
            if name not in self._buffers or end > self._buffers[name].shape[-2]:
                num_extra = self._allocation(end) - start
                self._buffers[name] = pad(getattr(self, name), (0, 0, 0, num_extra))
            self._buffers[name][:, :, start:end] = states
            setattr(self, name, self._buffers[name][:, :, :end])
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows in this order; in place if every moved row comes from the tail."""
        rows, length = beam_idx.tolist(), self.keys.shape[-2]
        into = [row for row, old in enumerate(rows) if row != old]
        out_of = [rows[row] for row in into]
        if not self._buffers or any(old < len(rows) for old in out_of):
            self._buffers.clear()
            super().reorder_cache(beam_idx)
            return
        for name, buffer in self._buffers.items():
            buffer[into, :, :length] = buffer[out_of, :, :length]
            self._buffers[name] = buffer[: len(rows)]
            setattr(self, name, buffer[: len(rows), :, :length])


@contextmanager
def grouped_attention(decoder: Any) -> Iterator[None]:
    """Use grouped-query attention without repeated keys and values, for models that use SDPA."""
    config, before = decoder.config, decoder.config._attn_implementation
    if before == SDPA and decoder._compiled_call_impl is None:
        config._attn_implementation = GROUPED
    try:
        yield
    finally:
        config._attn_implementation = before


def _grouped_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> Any:
    """Fold the query heads of a group into queries of one head, for a single-token query."""
    rows, heads, length, size = query.shape
    if length > 1 or heads == key.shape[1] or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    grouped = query.reshape(rows, key.shape[1], -1, size)
    scale = options.get("scaling")
    attended = scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scale
    )
    return attended.reshape(rows, 1, heads, -1), None


def _grouped_mask(**options: Any) -> Any:
    """Return the attention mask; for a single-token query, the padding mask alone."""
    one = options["q_length"] == 1 and options["mask_function"] is causal_mask_function
    real = options["attention_mask"]
    return sdpa_mask(**options) if not one or real is None else real[:, None, None]


AttentionInterface.register(GROUPED, _grouped_sdpa)
AttentionMaskInterface.register(GROUPED, _grouped_mask)
