"""The sizes of a decoder, and the FLOPs of a step's matrix products by purpose.

All rows have the longest length: prompts of P tokens, completions of C. The head is applied to
completion tokens only, in chunks whose gradient is computed immediately; where the loss couples the
tokens of a row, the head's forward pass runs twice. With checkpointing the layers' forward pass
also runs twice, except for the last product of each layer, which is still counted.

A matrix of n entries costs 2 n FLOP per token. Attention costs 4 FLOP per pair of query and key and
per query dimension: one product for the scores, one with the values. Norms, activations and the
softmax are ignored. A backward pass costs one forward pass for the gradient of a matrix's inputs,
and another one where the matrix is trained.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes of a decoder that uses every weight for every token (no experts)."""

    num_parameters: int
    num_trained: int
    num_layer_parameters: int
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
    def kv_entries_per_token(self) -> int:
        """Entries in the KV cache per token: keys and values of every layer."""
        return 2 * self.num_layers * self.key_heads * self.head_size

    def layer_flops(self, num_tokens: int) -> int:
        """Return the FLOPs of the layers' matrices in a forward pass."""
        return 2 * self.num_layer_parameters * num_tokens

    def attention_flops(self, num_pairs: int) -> int:
        """Return the FLOPs of attention in a forward pass."""
        return 4 * self.num_layers * self.query_heads * self.head_size * num_pairs

    def head_flops(self, num_tokens: int) -> int:
        """Return the FLOPs from hidden states to logits."""
        return 2 * self.hidden * self.vocabulary * num_tokens


def causal_pairs(length: int) -> int:
    """Return the number of query-key pairs in a row under a causal mask.

    >>> causal_pairs(3)
    6
    """
    return length * (length + 1) // 2


def dense_shape(
    *,
    num_layers: int,
    hidden: int,
    inner: int,
    heads: tuple[int, int, int],
    vocabulary: int,
    tied: bool = False,
) -> DecoderShape:
    """Return the shape of a gated decoder such as Llama, with every weight trained.

    `heads` are the number of query heads, of key heads, and the head size.

    >>> dense_shape(num_layers=32, hidden=4096, inner=14336, heads=(32, 8, 128),
    ...     vocabulary=128256).num_parameters
    8030261248
    """
    queries, keys, size = heads
    attention = hidden * (queries + 2 * keys) * size + queries * size * hidden
    layer = attention + 3 * hidden * inner + 2 * hidden
    in_layers = num_layers * layer + hidden
    total = in_layers + (1 if tied else 2) * vocabulary * hidden
    return DecoderShape(
        num_parameters=total,
        num_trained=total,
        num_layer_parameters=in_layers,
        num_layers=num_layers,
        hidden=hidden,
        query_heads=queries,
        key_heads=keys,
        head_size=size,
        vocabulary=vocabulary,
    )


def decoder_shape(lm: Any, *, num_parameters: int, num_trainable: int) -> DecoderShape:
    """Return the shape of a transformers model, from its config, embedding and head."""
    config = lm.config.get_text_config()
    ends = {
        id(end.weight): end.weight for end in (lm.get_input_embeddings(), _output_embedding(lm))
    }
    vocabulary, hidden = _output_embedding(lm).weight.shape
    queries = int(config.num_attention_heads)
    return DecoderShape(
        num_parameters=num_parameters,
        num_trained=num_trainable,
        num_layer_parameters=num_parameters - sum(int(weight.numel()) for weight in ends.values()),
        num_layers=int(config.num_hidden_layers),
        hidden=int(hidden),
        query_heads=queries,
        key_heads=int(getattr(config, "num_key_value_heads", None) or queries),
        head_size=int(getattr(config, "head_dim", None) or config.hidden_size // queries),
        vocabulary=int(vocabulary),
    )


def _output_embedding(lm: Any) -> Any:
    return lm.get_output_embeddings()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Sizes and options of one step."""

    prompts: int
    group: int
    prompt_length: int
    completion_length: int
    micro_batch: int = 8
    updates: int = 1
    scores_old: bool = False
    """Whether `logp_old` is scored separately before the updates."""
    reference: bool = False
    """Whether the step is scored by a reference."""
    whole_vocabulary: bool = False
    """Whether the KL term needs the reference's full vocabulary in every update."""
    stores_top_k: bool = False
    """Whether it needs only top-k entries, which are stored when the step is scored."""
    split_gradient_fraction: int | float = 0
    """Fraction of steps that compute the KL gradient separately."""
    checkpointing: bool = False
    couples_row_tokens: bool = False
    """Whether a token's loss depends on other tokens of its row."""

    @property
    def num_extra_reference_passes(self) -> int:
        """Reference passes after scoring: its hidden states are stored for a single update only."""
        return self.updates if self.whole_vocabulary and self.updates > 1 else 0

    @property
    def rows(self) -> int:
        """Number of completions."""
        return self.prompts * self.group

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of all completions."""
        return self.rows * self.completion_length

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, counted once per completion."""
        return self.rows * self.prompt_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Flop:
    """FLOPs of matrix products, by precision."""

    layers: int | float = 0
    """In the recipe's precision."""
    head: int | float = 0
    """Always fp32 in scoring and training."""

    @property
    def total_flops(self) -> int | float:
        """Both together."""
        return self.layers + self.head

    def __add__(self, other: "Flop") -> "Flop":
        return Flop(layers=self.layers + other.layers, head=self.head + other.head)

    def scaled_by(self, factor: int | float) -> "Flop":
        """Return the FLOPs multiplied by a factor."""
        return Flop(layers=factor * self.layers, head=factor * self.head)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """FLOPs of one step's matrix products."""

    reading: Flop
    """Prefill: each prompt once."""
    sampling: Flop
    """Decoding: every completion token, one at a time."""
    scoring: Flop
    """`logp_old`, where it is scored separately."""
    reference: Flop
    """Reference passes that only a KL needs."""
    updating: Flop
    """Forward and backward passes of all updates."""
    apart: Flop
    """The separate KL gradient diagnostic, averaged over all steps."""

    @property
    def learning(self) -> Flop:
        """Everything except sampling."""
        return self.scoring + self.reference + self.updating + self.apart

    @property
    def kl(self) -> Flop:
        """The cost of the KL."""
        return self.reference + self.apart

    @property
    def total_flops(self) -> Flop:
        """Everything."""
        return self.reading + self.sampling + self.learning


@cache  # the search for a split calls it repeatedly with equal arguments
def step_flops(shape: DecoderShape, sizes: StepSizes) -> StepFlops:
    """Return the FLOPs of a step."""
    forward_pass = forward_flops(shape, sizes)
    one_update = training_flops(shape, sizes)
    head = Flop(head=forward_pass.head)
    reference = Flop()
    if sizes.reference:
        # the exact KL of one completion per group is a metric of every update
        exact_kl = head.scaled_by(2 * sizes.updates / sizes.group)
        reference = forward_pass + exact_kl
    if sizes.stores_top_k:
        reference += head.scaled_by(2)
    if sizes.whole_vocabulary:
        whole_kl = head.scaled_by(sizes.updates * (2 if sizes.couples_row_tokens else 1))
        extra_passes = Flop(layers=forward_pass.layers * sizes.num_extra_reference_passes)
        reference = forward_pass + extra_passes + whole_kl
    return StepFlops(
        reading=_prefill_flops(shape, sizes),
        sampling=_decode_flops(shape, sizes),
        scoring=forward_pass if sizes.scores_old else Flop(),
        reference=reference,
        updating=one_update.scaled_by(sizes.updates),
        apart=one_update.scaled_by(sizes.updates * sizes.split_gradient_fraction),
    )


def forward_flops(shape: DecoderShape, sizes: StepSizes) -> Flop:
    """Return the FLOPs of a forward pass over all rows."""
    length = sizes.prompt_length + sizes.completion_length
    layers = shape.layer_flops(length) + shape.attention_flops(causal_pairs(length))
    return Flop(layers=sizes.rows * layers, head=shape.head_flops(sizes.num_completion_tokens))


def training_flops(shape: DecoderShape, sizes: StepSizes) -> Flop:
    """Return the FLOPs of a forward and a backward pass over all rows."""
    length = sizes.prompt_length + sizes.completion_length
    matrices = sizes.rows * shape.layer_flops(length)
    attention = sizes.rows * shape.attention_flops(causal_pairs(length))
    backward = 2 if shape.trains_all else 1
    layers = (1 + backward) * matrices + 3 * attention
    recomputed = matrices + attention if sizes.checkpointing else 0
    forward = 2 if sizes.couples_row_tokens else 1
    head = (forward + backward) * shape.head_flops(sizes.num_completion_tokens)
    return Flop(layers=layers + recomputed, head=head)


def _prefill_flops(shape: DecoderShape, sizes: StepSizes) -> Flop:
    length = sizes.prompt_length
    layers = shape.layer_flops(length) + shape.attention_flops(causal_pairs(length))
    return Flop(layers=sizes.prompts * layers, head=shape.head_flops(sizes.prompts))


def _decode_flops(shape: DecoderShape, sizes: StepSizes) -> Flop:
    start, num = sizes.prompt_length, sizes.completion_length
    pairs = causal_pairs(start + num) - causal_pairs(start)
    layers = shape.layer_flops(num) + shape.attention_flops(pairs)
    return Flop(layers=sizes.rows * layers, head=shape.head_flops(sizes.num_completion_tokens))
