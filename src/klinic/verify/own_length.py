"""Measures a function averaged over each completion's own length, as many trainers do.

A pull that is the same for every token has no expected gradient in a sum over tokens. Divided by
the length n of the completion, it has that of E[1/n]: it pushes towards longer completions. So the
expected gradient under `sequence_mean` is compared with that of sg(k1) logp under the same average,
in worlds whose completions end early. Completions of equal length are called together, unpadded.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from klinic.maths.score import score_term
from klinic.verify.expectation import EnumeratedPairs
from klinic.verify.identify import worst_error
from klinic.verify.loading import UserFunction
from klinic.verify.user_worlds import token_arrays, unequal_length_set

MULTIPLE_TOLERANCE = 1e-4

Vector = Float[Tensor, "P"]


@dataclass(frozen=True, kw_only=True)
class OwnLengthMeasurement:
    """The expected gradient under `sequence_mean`, compared with that of sg(k1) logp."""

    error: float
    """Norm of the difference, relative to the gradient of sg(k1) logp, in the worst world."""
    length_push: float | None
    """The multiple of grad E[1/n] by which the gradient differs; None if it is not a multiple."""


def measure_own_length(function: UserFunction, scale: float) -> OwnLengthMeasurement:
    """Return the difference to sg(k1) logp times the scale; 0 for no gradient in a sum."""
    differences, pushes, sizes = [], [], []
    for pairs in unequal_length_set().world_pairs:
        logp, logp_ref = pairs.inputs.logp, pairs.inputs.logp_ref
        k1_gradient = _mean_gradient(pairs, score_term(logp - logp_ref, logp=logp))
        gradient = _mean_gradient(pairs, _evaluate_by_length(function, pairs))
        differences.append(gradient - scale * k1_gradient)
        pushes.append(_mean_gradient(pairs, logp))
        sizes.append(float(k1_gradient.norm()) * (abs(scale) or 1.0))
    difference, push = torch.cat(differences), torch.cat(pushes)
    multiple = float(difference @ push / (push @ push))
    rest = float((difference - multiple * push).norm())
    is_multiple = rest < MULTIPLE_TOLERANCE * float(difference.norm())
    return OwnLengthMeasurement(
        error=worst_error(
            float(x.norm()) / size for x, size in zip(differences, sizes, strict=True)
        ),
        length_push=multiple if is_multiple else None,
    )


def _mean_gradient(pairs: EnumeratedPairs, terms: Float[Tensor, "N"]) -> Vector:
    """Return the expected gradient of the mean over each completion's own length."""
    completions = pairs.world.completion_pairs
    length = completions.row_offsets.diff()[completions.row_of_token]
    probability = pairs.world.pair_probability[pairs.pair_of_token]
    return pairs.total_gradient(terms / length * pairs.weights * probability)


def _evaluate_by_length(function: UserFunction, pairs: EnumeratedPairs) -> Float[Tensor, "N"]:
    """Return the value of each token, from one call for all completions of a length."""
    completions, by_token = pairs.world.completion_pairs, token_arrays(pairs)
    lengths, starts = completions.row_offsets.diff(), completions.row_offsets[:-1]
    values: Tensor = 0 * pairs.inputs.logp  # part of the graph, for a detached function too
    for length in sorted(set(lengths.tolist())):
        index = starts[lengths == length][:, None] + torch.arange(length)
        result = function({name: array[index] for name, array in by_token.items()})
        values = values.index_add(0, index.flatten(), result.double().flatten())
    return values
