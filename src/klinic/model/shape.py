"""Sizes of a decoder, and the FLOPs of its matrix products.

A matrix of n entries costs 2 n FLOP per token. Attention costs 4 FLOP per pair of query and key and
per query dimension: one product for the scores, one with the values. Norms, activations and the
softmax are ignored. A backward pass costs one forward pass for the gradient of a matrix's inputs,
and another one where the matrix is trained.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a decoder that uses every weight for every token (no experts)."""

    num_parameters: int
    num_trained: int
    num_in_layers: int
    """Parameters of the layers, adapters included: all but the embedding and the head."""
    num_layers: int
    hidden: int
    query_heads: int
    key_heads: int
    head_size: int
    vocabulary: int

    @property
    def trains_all(self) -> bool:
        """Whether the matrices themselves are trained, not adapters."""
        return 2 * self.num_trained > self.num_parameters

    @property
    def num_cached(self) -> int:
        """Entries in the KV cache per token: keys and values of every layer."""
        return 2 * self.num_layers * self.key_heads * self.head_size

    def layers(self, num_tokens: int) -> int:
        """Return the FLOPs of the layers' matrices in a forward pass."""
        return 2 * self.num_in_layers * num_tokens

    def attention(self, num_pairs: int) -> int:
        """Return the FLOPs of attention in a forward pass."""
        return 4 * self.num_layers * self.query_heads * self.head_size * num_pairs

    def head(self, num_tokens: int) -> int:
        """Return the FLOPs from hidden states to logits."""
        return 2 * self.hidden * self.vocabulary * num_tokens


def causal_pairs(length: int) -> int:
    """Return the number of query-key pairs in a row under a causal mask.

    >>> causal_pairs(3)
    6
    """
    return length * (length + 1) // 2


def dense(
    *,
    num_layers: int,
    hidden: int,
    inner: int,
    heads: tuple[int, int, int],
    vocabulary: int,
    tied: bool = False,
) -> Shape:
    """Return the shape of a gated decoder such as Llama, with every weight trained.

    `heads` are the number of query heads, of key heads, and the head size.

    >>> dense(num_layers=32, hidden=4096, inner=14336, heads=(32, 8, 128),
    ...     vocabulary=128256).num_parameters
    8030261248
    """
    queries, keys, size = heads
    attention = hidden * (queries + 2 * keys) * size + queries * size * hidden
    layer = attention + 3 * hidden * inner + 2 * hidden
    in_layers = num_layers * layer + hidden
    total = in_layers + (1 if tied else 2) * vocabulary * hidden
    return Shape(
        num_parameters=total,
        num_trained=total,
        num_in_layers=in_layers,
        num_layers=num_layers,
        hidden=hidden,
        query_heads=queries,
        key_heads=keys,
        head_size=size,
        vocabulary=vocabulary,
    )


def shape_of(lm: Any, *, num_parameters: int, num_trainable: int) -> Shape:
    """Return the shape of a transformers model, from its config, embedding and head."""
    config = lm.config.get_text_config()
    ends = {id(end.weight): end.weight for end in (lm.get_input_embeddings(), _head(lm))}
    vocabulary, hidden = _head(lm).weight.shape
    queries = int(config.num_attention_heads)
    return Shape(
        num_parameters=num_parameters,
        num_trained=num_trainable,
        num_in_layers=num_parameters - sum(int(weight.numel()) for weight in ends.values()),
        num_layers=int(config.num_hidden_layers),
        hidden=int(hidden),
        query_heads=queries,
        key_heads=int(getattr(config, "num_key_value_heads", None) or queries),
        head_size=int(getattr(config, "head_dim", None) or config.hidden_size // queries),
        vocabulary=int(vocabulary),
    )


def _head(lm: Any) -> Any:
    return lm.get_output_embeddings()
