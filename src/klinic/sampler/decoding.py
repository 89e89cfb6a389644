"""Batched decoding with a KV cache: takes contexts, fills token streams.

Contexts are left-padded so that all rows append at the same index. Duplicate contexts are prefilled
once and their cache is copied. A finished row leaves the batch immediately.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from klinic.errors import ConfigError
from klinic.model.scorer import TokenScorer
from klinic.sampler.kv_cache import BLOCK, AllocationRule, grouped_attention, make_growing_cache
from klinic.sampler.token_sampling import SamplingParams, sample_tokens

FinishReason = Literal["stop", "length"]


@dataclass(slots=True, kw_only=True)
class Stream:
    """A completion being generated."""

    context: np.ndarray
    uniforms: np.ndarray
    """One uniform number for each token that may still be sampled."""
    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def append_token(self, token_id: int, logp: float, eos_ids: frozenset[int]) -> None:
        """Append a sampled token and set the finish reason if it is the last."""
        self.token_ids.append(token_id)
        self.logp.append(logp)
        if token_id in eos_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == len(self.uniforms):
            self.finish_reason = "length"


@torch.no_grad()
def decode(  # noqa: PLR0913 - rows and how to complete them, by keyword
    scorer: TokenScorer,
    streams: Sequence[Stream],
    *,
    params: SamplingParams,
    eos_ids: frozenset[int],
    pad_id: int,
    block: int = BLOCK,
    before_pass: Callable[[], None] = lambda: None,
) -> Iterator[list[int]]:
    """Fill the streams; after every token, yield the indices of the streams that finished.

    `before_pass` is called before every forward pass.
    """
    rows, contexts = list(range(len(streams))), [stream.context for stream in streams]
    max_length = max(map(len, contexts)) + max(len(stream.uniforms) for stream in streams) - 1
    before_pass()
    cached = _DecodingBatch(
        scorer, contexts, pad_id, lambda length: min(length - 1 + block, max_length)
    )
    while rows:
        numbers = [streams[i].uniforms[len(streams[i].token_ids)] for i in rows]
        uniform = torch.tensor(numbers, dtype=torch.float64, device=scorer.device)
        sampled = sample_tokens(cached.logits, uniform, params)
        values = zip(rows, sampled.token_ids.tolist(), sampled.logp.tolist(), strict=True)
        for i, token_id, logp in values:
            streams[i].append_token(token_id, logp, eos_ids)
        yield [i for i in rows if streams[i].finish_reason is not None]
        going = _compact_rows([row for row, i in enumerate(rows) if not streams[i].finish_reason])
        token_ids = sampled.token_ids
        if len(going) < len(rows):
            token_ids = token_ids[going]
            rows = [rows[row] for row in going]
            cached.select_rows(going)
        if rows:
            before_pass()
            cached.append_tokens(token_ids)


def _compact_rows(going: list[int]) -> list[int]:
    """Return the unfinished rows, compacted: trailing rows move into the slots of finished ones.

    >>> _compact_rows([0, 2, 3, 5])
    [0, 5, 2, 3]
    """
    staying, behind = set(going), [row for row in going if row >= len(going)]
    return [row if row in staying else behind.pop() for row in range(len(going))]


class _DecodingBatch:
    """A batch of contexts with their KV cache and the next-token logits."""

    logits: Float[Tensor, "R V"]

    def __init__(
        self,
        scorer: TokenScorer,
        contexts: Sequence[np.ndarray],
        pad_id: int,
        allocation: AllocationRule,
    ) -> None:
        self._scorer = scorer
        self._decoder = scorer.lm.get_decoder()
        self._cache = make_growing_cache(self._decoder, allocation)
        unique, copies = _unique_contexts(contexts)
        longest = max(map(len, unique))
        ids = np.full((len(unique), longest), pad_id, dtype=np.int64)
        for row, context in zip(ids, unique, strict=True):
            row[longest - len(context) :] = context
        lengths = np.array([[len(context)] for context in unique])
        position = np.arange(longest) - (longest - lengths)
        self._padded = bool((lengths < longest).any())
        self._mask = torch.from_numpy(position >= 0).to(scorer.device)
        self._position = torch.from_numpy(position.clip(min=0)).to(scorer.device)
        self._forward(torch.from_numpy(ids).to(scorer.device))
        self.select_rows(copies)
        self.logits = self.logits[copies]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Select these cache rows in this order; a row may repeat."""
        index = torch.tensor(rows, dtype=torch.int64)
        self._cache.reorder_cache(index)
        self._mask, self._position = self._mask[index], self._position[index]

    def append_tokens(self, token_ids: Int[Tensor, "R"]) -> None:
        """Append a token to every row and compute the next logits."""
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], -1)
        self._position = self._position[:, -1:] + 1
        self._forward(token_ids[:, None])

    def _forward(self, ids: Int[Tensor, "R L"]) -> None:
        with grouped_attention(self._decoder):
            output = self._scorer.decode(
                input_ids=ids,
                # without padding no mask is needed, which allows faster kernels
                attention_mask=self._mask if self._padded else None,
                position_ids=self._position,
                past_key_values=self._cache,
                use_cache=True,
            )
        if getattr(output, "past_key_values", None) is not self._cache:
            raise ConfigError(
                f"the model is a {type(self._decoder).__name__}, whose cache is not a transformers "
                "KV cache that klinic supports. Set sampler.type: vllm, or use another model."
            )
        self.logits = self._scorer.head(output.last_hidden_state[:, -1])


def _unique_contexts(contexts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    """Return the distinct contexts, and for each input the index of its distinct context."""
    index_of: dict[bytes, int] = {}
    copies = [index_of.setdefault(context.tobytes(), len(index_of)) for context in contexts]
    firsts = [copies.index(number) for number in range(len(index_of))]
    return [contexts[first] for first in firsts], copies
