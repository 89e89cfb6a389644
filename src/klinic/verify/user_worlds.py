"""Toy worlds for a user's function, and its evaluation on all their pairs of completions.

Most worlds have completions of equal length, which fit [completions, tokens] tensors. A function
that takes a mask also sees completions that end early, padded with values that it must ignore.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from klinic.maths.score import score_term
from klinic.model.token_filters import TokenFilters
from klinic.verify.estimators import WorldSet
from klinic.verify.expectation import EnumeratedPairs, GradientMoments, gradient_moments
from klinic.verify.loading import UserFunction
from klinic.verify.toy_policies import (
    COMPLETION_LENGTH,
    PAIR_SIZE,
    Completions,
    World,
    make_world,
    truncate_world,
)

# Padding is the first token times a factor: it carries a gradient, as that of a model does, and a
# function that ignores the mask shows it.
PADDING = {"logp": 1.4, "logp_ref": 0.8, "logp_old": 1.2, "logits": 1.3, "logits_ref": 0.7}
FAR_REFERENCE_DRIFT = 15.0


class CompletionWorld(World):
    """A world that lists each completion as a pair with itself instead of all pairs.

    The gradient of a function that treats each completion alone has the same mean over both, and
    64 pairs are faster than 4,096.
    """

    @cached_property
    def completion_pairs(self) -> Completions:
        """Every completion twice: rows 2i and 2i + 1 are completion i."""
        completions = self.completions
        steps = list(zip(completions.state.tolist(), completions.token.tolist(), strict=True))
        rows = [steps[start:end] for start, end in pairwise(completions.row_offsets.tolist())]
        return Completions.from_rows([row for row in rows for _ in range(PAIR_SIZE)])

    @cached_property
    def pair_probability(self) -> Float[Tensor, "G"]:
        """The probability of each completion under the sampler."""
        return self.completion_logp(self.theta_sampler).exp()


@cache
def on_policy_set() -> WorldSet:
    """Return the worlds that identify a gradient on policy."""
    return _rectangular_set(sampler_drift=0.0)


@cache
def off_policy_set(drift: float) -> WorldSet:
    """Return the same worlds with completions of an older policy."""
    return _rectangular_set(sampler_drift=drift)


def _rectangular_set(*, sampler_drift: float) -> WorldSet:
    return _completion_set(
        [
            make_world("near", seed=1, drift=0.15, sampler_drift=sampler_drift),
            make_world("far", seed=1, drift=1.2, sampler_drift=sampler_drift),
            make_world("very far", seed=9, drift=3.0, sampler_drift=sampler_drift),
            make_world("shared", seed=2, drift=1.0, shared=True, sampler_drift=sampler_drift),
        ]
    )


@cache
def far_reference_set() -> WorldSet:
    """Return worlds whose reference is up to 60 nats from tokens that the policy samples."""
    return _completion_set([_swap_policy_and_reference(world) for world in _far_worlds()])


@cache
def early_end_set() -> WorldSet:
    """Return worlds whose completions end early, for functions that take a mask."""
    return _completion_set(
        [make_world("shared eos", seed=6, drift=1.0, shared=True, ends_early=True)]
    )


@cache
def unequal_length_set() -> WorldSet:
    """Return worlds whose completions end early, for averages over each completion's length."""
    return _completion_set(
        [
            make_world("eos", seed=3, drift=1.2, ends_early=True),
            make_world("shared eos", seed=6, drift=1.0, shared=True, ends_early=True),
        ]
    )


@cache
def pair_set() -> WorldSet:
    """Return worlds with all pairs, for functions that mix the completions of a batch.

    The others keep two tokens per prefix, 64 pairs each: a value or a gradient that fits in one
    world alone is chance.
    """
    small_worlds = [
        truncate_world(make_world(name, seed=seed, drift=drift), TokenFilters(top_k=2))
        for name, seed, drift in (("near top-k", 1, 0.3), ("far top-k", 9, 2.0))
    ]
    return WorldSet.from_worlds(
        [make_world("shared", seed=2, drift=1.0, shared=True), *small_worlds]
    )


@cache
def far_reference_pair_set() -> WorldSet:
    """Return a world with all pairs whose reference is far from the policy."""
    return WorldSet.from_worlds([_swap_policy_and_reference(_far_worlds()[1])])


def _far_worlds() -> list[World]:
    return [
        make_world("far reference", seed=11, drift=FAR_REFERENCE_DRIFT),
        make_world("far shared reference", seed=12, drift=FAR_REFERENCE_DRIFT, shared=True),
    ]


def _swap_policy_and_reference(world: World) -> World:
    return replace(
        world, theta=world.theta_ref, theta_sampler=world.theta_ref, theta_ref=world.theta
    )


def _completion_set(worlds: Sequence[World]) -> WorldSet:
    return WorldSet.from_worlds(
        [
            CompletionWorld(**{field.name: getattr(world, field.name) for field in fields(world)})
            for world in worlds
        ]
    )


@dataclass(frozen=True)
class PrecomputedTerm:
    """A term that returns values computed in advance."""

    values: Float[Tensor, "N"]

    def __call__(self, _: object) -> Tensor:
        """Return the values, whatever the inputs."""
        return self.values


def evaluate_pairs(
    function: UserFunction,
    pairs: EnumeratedPairs,
    *,
    one_pair_per_call: bool = False,
    rounded_to: torch.dtype = torch.float64,
) -> Tensor:
    """Return the function's values on all pairs, [completions, tokens] or [completions]."""
    arrays = {
        name: array.to(rounded_to).double() if array.is_floating_point() else array
        for name, array in _padded_arrays(pairs).items()
    }
    if not one_pair_per_call:
        return function(arrays)
    # chunks, not slices: the backward pass of a slice fills a tensor of all pairs
    num_pairs = len(arrays["mask"]) // PAIR_SIZE
    by_pair = zip(*(array.chunk(num_pairs) for array in arrays.values()), strict=True)
    return torch.cat([function(dict(zip(arrays, pair, strict=True))) for pair in by_pair])


def token_arrays(pairs: EnumeratedPairs) -> dict[str, Tensor]:
    """Return the arguments of a user's function by role, one entry per token."""
    inputs, world, completions = pairs.inputs, pairs.world, pairs.world.completion_pairs
    return {
        "logp": inputs.logp,
        "logp_ref": inputs.logp_ref,
        "logp_old": inputs.logp_old,
        "logits": pairs.leaf_logits,
        "logits_ref": world.prefix_logits(world.theta_ref)[completions.state],
        "tokens": completions.token,
    }


def _padded_arrays(pairs: EnumeratedPairs) -> dict[str, Tensor]:
    completions = pairs.world.completion_pairs
    lengths = completions.row_offsets.diff()
    mask = torch.arange(COMPLETION_LENGTH) < lengths[:, None]

    def pad_rows(name: str, values: Tensor) -> Tensor:
        first = values[completions.row_offsets[:-1]] * PADDING.get(name, 1)
        padded = torch.stack([first] * COMPLETION_LENGTH, dim=1)
        padded[mask] = values
        return padded

    padded = {name: pad_rows(name, values) for name, values in token_arrays(pairs).items()}
    return padded | {"mask": mask}


def function_terms(
    function: UserFunction, world_pairs: Sequence[EnumeratedPairs], *, by_pair: bool = False
) -> list[PrecomputedTerm]:
    """Return the function's values in each world as a term, per token."""
    return [
        _token_term(evaluate_pairs(function, pairs, one_pair_per_call=by_pair), pairs)
        for pairs in world_pairs
    ]


def _token_term(values: Tensor, pairs: EnumeratedPairs) -> PrecomputedTerm:
    """Return values per token; one per completion goes to its first token."""
    offsets = pairs.world.completion_pairs.row_offsets
    mask = torch.arange(COMPLETION_LENGTH) < offsets.diff()[:, None]
    if values.ndim == 1:
        values = torch.nn.functional.pad(values[:, None], (0, COMPLETION_LENGTH - 1))
    return PrecomputedTerm(values[mask].double() + 0 * pairs.inputs.logp)


def term_moments(
    terms: Sequence[PrecomputedTerm], world_pairs: Sequence[EnumeratedPairs]
) -> list[GradientMoments]:
    """Return the moments of the terms in their worlds."""
    return [gradient_moments(pairs, term) for term, pairs in zip(terms, world_pairs, strict=True)]


def as_reward_terms(
    terms: Sequence[PrecomputedTerm], world_pairs: Sequence[EnumeratedPairs]
) -> list[PrecomputedTerm]:
    """Return the terms detached and used as a cost in the reward of the completion."""
    return [_as_reward_term(term, pairs) for term, pairs in zip(terms, world_pairs, strict=True)]


def _as_reward_term(term: PrecomputedTerm, pairs: EnumeratedPairs) -> PrecomputedTerm:
    completions = pairs.world.completion_pairs
    row = completions.row_of_token
    cost = torch.zeros(completions.num_rows, dtype=torch.float64)
    cost = cost.index_add(0, row, term.values.detach())
    return PrecomputedTerm(score_term(cost[row], logp=pairs.inputs.logp))
