"""The matrix products of a step, by what they are for.

All rows are as long as the longest: prompts of P tokens, completions of C. The head is applied to
completion tokens alone, in chunks whose gradient is taken on the way; where the loss looks along
rows, its forward pass is made twice. With checkpointing so is that of the layers, but for the last
product of each, which is counted here.
"""

from dataclasses import dataclass
from functools import cache

from klinic.model.shape import Shape, causal_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """How much one step is asked to do."""

    prompts: int
    group: int
    prompt_length: int
    completion_length: int
    micro_batch: int = 8
    updates: int = 1
    scores_old: bool = False
    """Whether the policy is scored apart before its updates."""
    reference: bool = False
    """Whether the step is compared with a reference."""
    whole_vocabulary: bool = False
    """Whether the KL term needs every outcome under the reference in every update."""
    kept_top: bool = False
    """Whether it needs some outcomes, which are kept when the step is scored."""
    apart: int | float = 0
    """Share of the steps in which the gradient of the KL is taken apart."""
    checkpointing: bool = False
    along_the_row: bool = False
    """Whether the loss of a token looks at other tokens of its row."""

    @property
    def reference_again(self) -> int:
        """How often the reference runs after it has scored: its states are kept for one update."""
        return self.updates if self.whole_vocabulary and self.updates > 1 else 0

    @property
    def rows(self) -> int:
        """Completions."""
        return self.prompts * self.group

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of all completions."""
        return self.rows * self.completion_length

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each as often as it is completed."""
        return self.rows * self.prompt_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Flop:
    """Matrix products, by the precision they are made in."""

    layers: int | float = 0
    """In that of the recipe."""
    head: int | float = 0
    """Always in fp32 where it is scored or trained."""

    @property
    def total(self) -> int | float:
        """Both together."""
        return self.layers + self.head

    def __add__(self, other: "Flop") -> "Flop":
        return Flop(layers=self.layers + other.layers, head=self.head + other.head)

    def times(self, factor: int | float) -> "Flop":
        """Return the same, so many times."""
        return Flop(layers=factor * self.layers, head=factor * self.head)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The matrix products of one step."""

    reading: Flop
    """Each prompt once."""
    sampling: Flop
    """Every token of every completion, one after the other."""
    scoring: Flop
    """`logp_old`, where it is scored apart."""
    reference: Flop
    """All that only a KL asks of the reference."""
    updating: Flop
    """Forward and backward, all updates together."""
    apart: Flop
    """What the look at the KL's own gradient costs, spread over all steps."""

    @property
    def learning(self) -> Flop:
        """All but sampling."""
        return self.scoring + self.reference + self.updating + self.apart

    @property
    def kl(self) -> Flop:
        """What a KL adds."""
        return self.reference + self.apart

    @property
    def total(self) -> Flop:
        """Everything."""
        return self.reading + self.sampling + self.learning


@cache  # a division tries many, and they depend on neither number
def work_of(shape: Shape, sizes: StepSizes) -> Work:
    """Return the matrix products of a step."""
    forward = scored(shape, sizes)
    once = trained(shape, sizes)
    head = Flop(head=forward.head)
    reference = Flop()
    if sizes.reference:
        # for people, the KL of one completion a group is made exactly in every update
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
    """Return a forward pass over all rows."""
    length = sizes.prompt_length + sizes.completion_length
    layers = shape.layers(length) + shape.attention(causal_pairs(length))
    return Flop(layers=sizes.rows * layers, head=shape.head(sizes.num_completion_tokens))


def trained(shape: Shape, sizes: StepSizes) -> Flop:
    """Return a forward and a backward pass over all rows."""
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
