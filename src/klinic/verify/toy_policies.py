"""Toy policies with enumerable completions, so that an expectation is an exact sum.

A world has a policy, a reference and a sampler over a vocabulary of 4 and completions of up to 3
tokens. Its parameters are the logits themselves ("tabular") or shared by all prefixes, as in a
network that generalises; a completion has 3 tokens or ends early at the last token of the
vocabulary ("eos"). All tensors are float64.

In a truncated world ("top-p", "top-k") the sampler returns only the tokens that it keeps at a
prefix. Policy and reference are restricted to the same tokens, as the learner scores them.

Baselines need a second group member, and averages need rows of unequal length, so the worlds
enumerate all pairs of completions of one prompt, each with its probability under the sampler.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from klinic.model.determinism import initialize_vml_kernels
from klinic.model.token_filters import TokenFilters, filter_mask

VOCAB_SIZE, COMPLETION_LENGTH, PAIR_SIZE = 4, 3, 2
EOS = VOCAB_SIZE - 1
EXCLUDED_LOGIT = -1e4  # probability exactly 0 in float64, and finite differences
NUM_SHARED_PARAMETERS = 20  # parameters of the shared policies: fewer than their 84 logits


@dataclass(frozen=True, kw_only=True)
class World:
    """Policy, reference and sampler, as parameters of one family of toy policies."""

    name: str
    base: Float[Tensor, "S V"]
    features: Float[Tensor, "S*V P"]
    theta: Float[Tensor, "P"]
    theta_ref: Float[Tensor, "P"]
    theta_sampler: Float[Tensor, "P"]
    ends_early: bool
    kept: Bool[Tensor, "S V"] | None = None
    """The tokens that the sampler keeps at each prefix; None for all."""

    def prefix_logits(self, theta: Float[Tensor, "P"]) -> Float[Tensor, "S V"]:
        """Return the logits at every prefix."""
        logits = self.base + (self.features @ theta).view_as(self.base)
        return logits if self.kept is None else logits.masked_fill(~self.kept, EXCLUDED_LOGIT)

    def prefix_log_probs(self, theta: Float[Tensor, "P"]) -> Float[Tensor, "S V"]:
        """Return the log-probs of every token at every prefix."""
        return self.prefix_logits(theta).log_softmax(-1)

    def completion_logp(self, theta: Float[Tensor, "P"]) -> Float[Tensor, "B"]:
        """Return the log-prob of every completion."""
        completions = self.completions
        logp = self.prefix_log_probs(theta)[completions.state, completions.token]
        total = torch.zeros(completions.num_rows, dtype=logp.dtype)
        return total.index_add(0, completions.row_of_token, logp)

    @cached_property
    def completions(self) -> "Completions":
        """Every completion once."""
        return Completions.from_rows(list(_enumerate_completions(self)))

    @cached_property
    def completion_pairs(self) -> "Completions":
        """Every pair of completions: rows 2i and 2i + 1 are the pair i."""
        rows = list(_enumerate_completions(self))
        return Completions.from_rows([row for a in rows for b in rows for row in (a, b)])

    @cached_property
    def pair_probability(self) -> Float[Tensor, "G"]:
        """The probability of each pair under the sampler."""
        probability = self.completion_logp(self.theta_sampler).exp()
        return (probability[:, None] * probability[None, :]).flatten()


@dataclass(frozen=True, kw_only=True)
class Completions:
    """Concatenated completions: the token and its prefix, per position."""

    state: Int[Tensor, "N"]
    token: Int[Tensor, "N"]
    row_offsets: Int[Tensor, "offsets"]

    @classmethod
    def from_rows(cls, rows: list[list[tuple[int, int]]]) -> "Completions":
        """Concatenate the rows."""
        flat = torch.tensor([step for row in rows for step in row])
        lengths = torch.tensor([0] + [len(row) for row in rows])
        return cls(state=flat[:, 0], token=flat[:, 1], row_offsets=lengths.cumsum(0))

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.row_offsets) - 1

    @property
    def row_of_token(self) -> Int[Tensor, "N"]:
        """The row of every token."""
        return torch.arange(self.num_rows).repeat_interleave(self.row_offsets.diff())


def _enumerate_completions(world: World) -> Iterator[list[tuple[int, int]]]:
    """Yield every completion as (prefix number, token) pairs; prefixes are numbered in base 4."""

    def extend_prefix(prefix: int, row: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        has_ended = world.ends_early and bool(row) and row[-1][1] == EOS
        if len(row) == COMPLETION_LENGTH or has_ended:
            yield row
            return
        for token in range(VOCAB_SIZE):
            if world.kept is not None and not world.kept[prefix, token]:
                continue
            # prefix 0 is empty; the children of p are 4 p + 1 to 4 p + 4
            yield from extend_prefix(VOCAB_SIZE * prefix + token + 1, [*row, (prefix, token)])

    yield from extend_prefix(0, [])


def make_world(
    name: str,
    *,
    seed: int,
    drift: float,
    shared: bool = False,
    ends_early: bool = False,
    sampler_drift: float = 0.0,
) -> World:
    """Return a random world; `drift` is the distance of the policy from the reference."""
    initialize_vml_kernels()
    rng = torch.Generator().manual_seed(seed)

    def sample_normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    num_states = sum(VOCAB_SIZE**depth for depth in range(COMPLETION_LENGTH))
    num_logits = num_states * VOCAB_SIZE
    features = torch.eye(num_logits, dtype=torch.float64)
    if shared:
        features = sample_normal(num_logits, NUM_SHARED_PARAMETERS) / math.sqrt(5)
    base = 1.2 * sample_normal(num_states, VOCAB_SIZE)
    theta = drift * sample_normal(features.shape[1])
    return World(
        name=name,
        base=base,
        features=features,
        theta=theta,
        theta_ref=torch.zeros_like(theta),
        theta_sampler=theta + sampler_drift * sample_normal(len(theta)),
        ends_early=ends_early,
    )


def truncate_world(world: World, filters: TokenFilters) -> World:
    """Return the world with the tokens that its sampler keeps."""
    return replace(world, kept=filter_mask(world.prefix_log_probs(world.theta_sampler), filters))


def on_policy_worlds() -> list[World]:
    """Return the worlds whose sampler is the policy."""
    return [
        make_world("near", seed=1, drift=0.15),
        make_world("far", seed=1, drift=1.2),
        make_world("shared", seed=2, drift=1.0, shared=True),
        make_world("eos", seed=3, drift=1.2, ends_early=True),
        make_world("shared eos", seed=6, drift=1.0, shared=True, ends_early=True),
        truncate_world(make_world("top-p", seed=9, drift=1.0), TokenFilters(top_p=0.8)),
        truncate_world(
            make_world("top-k shared", seed=10, drift=1.0, shared=True), TokenFilters(top_k=3)
        ),
    ]


def off_policy_worlds() -> list[World]:
    """Return the worlds whose sampler is an older policy."""
    return [
        make_world("old", seed=4, drift=1.0, sampler_drift=0.4),
        make_world("old shared", seed=5, drift=1.0, shared=True, sampler_drift=0.3),
        make_world("old eos", seed=7, drift=1.0, ends_early=True, sampler_drift=0.4),
        truncate_world(
            make_world("old top-p", seed=11, drift=1.0, sampler_drift=0.4), TokenFilters(top_p=0.9)
        ),
    ]
