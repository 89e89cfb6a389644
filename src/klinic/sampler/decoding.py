"""Batched decoding with a key-value cache: contexts in, streams of tokens out.

Contexts are padded on the left, so that all rows grow at the same place. Equal contexts are run
once and their cache is copied. A row that has ended leaves the batch at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from klinic.model.scorer import TokenScorer
from klinic.sampler.drawing import Drawing, Drawn, draw
from klinic.sampler.growing_cache import growing_cache, grouped_attention

FinishReason = Literal["stop", "length"]


@dataclass(slots=True, kw_only=True)
class Stream:
    """A completion in the making."""

    context: np.ndarray
    uniforms: np.ndarray
    """One number for each token it may still have."""
    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, token_id: int, logp: float, eos_ids: frozenset[int]) -> None:
        """Take the next token, and see whether it is the last."""
        self.token_ids.append(token_id)
        self.logp.append(logp)
        if token_id in eos_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == len(self.uniforms):
            self.finish_reason = "length"

    @property
    def next_uniform(self) -> float:
        """The number for the next token; an ended stream needs none."""
        return 0.0 if self.finish_reason else float(self.uniforms[len(self.token_ids)])


@torch.no_grad()
def decode(
    scorer: TokenScorer,
    streams: Sequence[Stream],
    *,
    how: Drawing,
    eos_ids: frozenset[int],
    pad_id: int,
) -> Iterator[list[int]]:
    """Fill the streams; yield, after every token, the numbers of those that ended with it."""
    rows = list(range(len(streams)))
    cached = _Cached(scorer, [stream.context for stream in streams], pad_id)
    while rows:
        uniform = torch.tensor([streams[i].next_uniform for i in rows], dtype=torch.float64)
        drawn = draw(cached.logits, uniform.to(scorer.device), how)
        yield _deal(streams, rows, drawn, eos_ids)
        going = [row for row, i in enumerate(rows) if streams[i].finish_reason is None]
        token_ids = drawn.token_ids
        if len(going) < len(rows):
            kept = _closed_up(going)
            token_ids = token_ids[kept]
            rows = [rows[row] for row in kept]
            cached.keep(kept)
        if rows:
            cached.grow(token_ids)


def _closed_up(going: list[int]) -> list[int]:
    """Return the rows that go on, each in its place but for the last, which fill the gaps.

    >>> _closed_up([0, 2, 3, 5])
    [0, 5, 2, 3]
    """
    staying = set(going)
    behind = [row for row in going if row >= len(going)]
    return [row if row in staying else behind.pop() for row in range(len(going))]


def _deal(
    streams: Sequence[Stream], rows: list[int], drawn: Drawn, eos_ids: frozenset[int]
) -> list[int]:
    """Give each running stream its token; return the numbers of those that ended."""
    ended = []
    pairs = zip(rows, drawn.token_ids.tolist(), drawn.logp.tolist(), strict=True)
    for i, token_id, logp in pairs:
        if streams[i].finish_reason is None:
            streams[i].add(token_id, logp, eos_ids)
            if streams[i].finish_reason is not None:
                ended.append(i)
    return ended


class _Cached:
    """A batch of contexts with their cache, and the logits of what comes next."""

    logits: Float[Tensor, "R V"]

    def __init__(self, scorer: TokenScorer, contexts: Sequence[np.ndarray], pad_id: int) -> None:
        self._scorer = scorer
        self._decoder = scorer.lm.get_decoder()
        self._cache = growing_cache(self._decoder)
        unique, copies = _unique(contexts)
        longest = max(len(context) for context in unique)
        ids = np.full((len(unique), longest), pad_id, dtype=np.int64)
        for row, context in enumerate(unique):
            ids[row, longest - len(context) :] = context
        start = np.array([longest - len(context) for context in unique])
        position = np.arange(longest)[None] - start[:, None]
        self._padded = bool(start.any())
        self._mask = torch.from_numpy((position >= 0).astype(np.int64)).to(scorer.device)
        self._position = torch.from_numpy(position.clip(min=0)).to(scorer.device)
        self._run(torch.from_numpy(ids).to(scorer.device))
        self.keep(copies)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be kept twice."""
        index = torch.tensor(rows, dtype=torch.int64, device=self._mask.device)
        self._cache.reorder_cache(index)
        self._mask, self._position = self._mask[index], self._position[index]
        self.logits = self.logits[index]

    def grow(self, token_ids: Int[Tensor, "R"]) -> None:
        """Add a token to every row and look at what comes next."""
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], -1)
        self._position = self._position[:, -1:] + 1
        self._run(token_ids[:, None])

    def _run(self, ids: Int[Tensor, "R L"]) -> None:
        with grouped_attention(self._decoder.config):
            output = self._scorer.decode(
                input_ids=ids,
                # without padding there is nothing to mask, and the faster kernels are open
                attention_mask=self._mask if self._padded else None,
                position_ids=self._position,
                past_key_values=self._cache,
                use_cache=True,
            )
        self.logits = self._scorer.head(output.last_hidden_state[:, -1])


def _unique(contexts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    """Return the different contexts, and for each given one which of them it is."""
    place: dict[bytes, int] = {}
    copies = [place.setdefault(context.tobytes(), len(place)) for context in contexts]
    firsts = [copies.index(number) for number in range(len(place))]
    return [contexts[first] for first in firsts], copies
