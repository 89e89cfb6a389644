"""FLOPs of a step's matrix products, by purpose.

All rows have the longest length: prompts of P tokens, completions of C. The head is applied to
completion tokens only, in chunks whose gradient is computed immediately; where the loss couples the
tokens of a row, the head's forward pass runs twice. With checkpointing the layers' forward pass
also runs twice, except for the last product of each layer, which is still counted.
"""

from dataclasses import dataclass
from functools import cache

from klinic.model.shape import Shape, causal_pairs


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
    kept_top: bool = False
    """Whether it needs only top-k entries, which are stored when the step is scored."""
    apart: int | float = 0
    """Fraction of steps that compute the KL gradient separately."""
    checkpointing: bool = False
    along_the_row: bool = False
    """Whether a token's loss depends on other tokens of its row."""

    @property
    def reference_again(self) -> int:
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
    def total(self) -> int | float:
        """Both together."""
        return self.layers + self.head

    def __add__(self, other: "Flop") -> "Flop":
        return Flop(layers=self.layers + other.layers, head=self.head + other.head)

    def times(self, factor: int | float) -> "Flop":
        """Return the FLOPs multiplied by a factor."""
        return Flop(layers=factor * self.layers, head=factor * self.head)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
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
    def total(self) -> Flop:
        """Everything."""
        return self.reading + self.sampling + self.learning


@cache  # the search for a split calls it repeatedly with equal arguments
def work_of(shape: Shape, sizes: StepSizes) -> Work:
    """Return the FLOPs of a step."""
    forward = scored(shape, sizes)
    once = trained(shape, sizes)
    head = Flop(head=forward.head)
    reference = Flop()
    if sizes.reference:
        # the exact KL of one completion per group is a metric of every update
        looked = head.times(2 * sizes.updates / sizes.group)
        reference = forward + looked
    if sizes.kept_top:
        reference += head.times(2)
    if sizes.whole_vocabulary:
        compared = head.times(sizes.updates * (2 if sizes.along_the_row else 1))
        again = Flop(layers=forward.layers * sizes.reference_again)
        reference = forward + again + compared
    return Work(
        reading=_read(shape, sizes),
        sampling=_sampled(shape, sizes),
        scoring=forward if sizes.scores_old else Flop(),
        reference=reference,
        updating=once.times(sizes.updates),
        apart=once.times(sizes.updates * sizes.apart),
    )


def scored(shape: Shape, sizes: StepSizes) -> Flop:
    """Return the FLOPs of a forward pass over all rows."""
    length = sizes.prompt_length + sizes.completion_length
    layers = shape.layers(length) + shape.attention(causal_pairs(length))
    return Flop(layers=sizes.rows * layers, head=shape.head(sizes.num_completion_tokens))


def trained(shape: Shape, sizes: StepSizes) -> Flop:
    """Return the FLOPs of a forward and a backward pass over all rows."""
    length = sizes.prompt_length + sizes.completion_length
    matrices = sizes.rows * shape.layers(length)
    attention = sizes.rows * shape.attention(causal_pairs(length))
    backward = 2 if shape.trains_all else 1
    layers = (1 + backward) * matrices + 3 * attention
    again = matrices + attention if sizes.checkpointing else 0
    forward = 2 if sizes.along_the_row else 1
    head = (forward + backward) * shape.head(sizes.num_completion_tokens)
    return Flop(layers=layers + again, head=head)


def _read(shape: Shape, sizes: StepSizes) -> Flop:
    length = sizes.prompt_length
    layers = shape.layers(length) + shape.attention(causal_pairs(length))
    return Flop(layers=sizes.prompts * layers, head=shape.head(sizes.prompts))


def _sampled(shape: Shape, sizes: StepSizes) -> Flop:
    start, num = sizes.prompt_length, sizes.completion_length
    pairs = causal_pairs(start + num) - causal_pairs(start)
    layers = shape.layers(num) + shape.attention(pairs)
    return Flop(layers=sizes.rows * layers, head=shape.head(sizes.num_completion_tokens))
