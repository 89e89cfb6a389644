"""Least-squares fits of the recorded loss by the values of its possible terms."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from jaxtyping import Float

from klinic.checks.loss_values import LossValues

MIN_FREE = 2  # steps beyond the number of fitted coefficients
ROUNDING = 5e-7  # of the mean absolute advantage: a float32 loss of terms that cancel
MAX_NOISE = 20.0  # times the rounding error: a right combination leaves about 1
MAX_CONDITION = 1e4  # of the columns at unit length: float32 leaves 3 digits to tell them apart
MAX_DIGITS = 8  # decimals of a loss that was rounded before it was recorded
HALF_BITS = (8, 11)  # of the significand: bf16, fp16
TERMS = ("policy", "kl", "entropy")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")

Columns = Mapping[str, Float[np.ndarray, "S"]]
"""Values of a term in all steps, by form."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One combination of forms, fitted to the recorded loss."""

    forms: Mapping[str, str]
    """By term; a term whose value is lost in rounding is left out."""
    aggregation: str
    coefs: Mapping[str, float]
    errors: Mapping[str, float]
    """Standard errors of the coefficients."""
    sigma: float
    """Standard deviation of the residual, at least the rounding error of the loss."""


def fit_combinations(
    steps: Sequence[LossValues], is_possible: Callable[[str, str, str], bool]
) -> list[Fit]:
    """Return the combinations of forms and aggregation that fit within rounding.

    `is_possible` takes a term, its form and its aggregation.
    """
    loss = np.array([step.loss for step in steps])
    noise = _loss_noise(loss, steps)
    if noise is None:
        return []
    columns = {}
    for term, aggregation in product(TERMS, AGGREGATIONS):
        values = [
            {
                form: x
                for (form, by), x in getattr(step, term).items()
                if by == aggregation and is_possible(term, form, aggregation)
            }
            for step in steps
        ]
        columns[term, aggregation] = _distinct_columns(values, noise)
    vanishing = {term for (term, _), (_, may_vanish) in columns.items() if may_vanish}
    vanishing |= {t for t in TERMS if not any(columns[t, name][0] for name in AGGREGATIONS)}
    return [
        fit
        for aggregation in AGGREGATIONS
        for chosen in _term_choices(columns, aggregation, vanishing)
        for fit in _fit_columns(chosen, loss, aggregation, noise)
        if fit.sigma <= MAX_NOISE * noise
    ]


def _loss_noise(loss: Float[np.ndarray, "S"], steps: Sequence[LossValues]) -> float | None:
    """Return the rounding error of the recorded loss; None if the loss is 0 in every step."""
    if not loss.any():
        return None
    size = float(np.mean([step.advantage_size for step in steps]))
    largest = float(np.abs(loss).max())
    noise = ROUNDING * max(size, largest)
    digits = next((d for d in range(MAX_DIGITS) if np.array_equal(np.round(loss, d), loss)), None)
    fractions = np.frexp(loss)[0]
    bits = next(
        (b for b in HALF_BITS if np.array_equal(np.round(fractions * 2**b), fractions * 2**b)), None
    )
    return max(
        noise,
        0.0 if digits is None else 0.5 * 10.0**-digits,
        0.0 if bits is None else 2.0**-bits * largest,
    )


def _term_choices(
    columns: Mapping[tuple[str, str], tuple[Columns, bool]], aggregation: str, vanishing: set[str]
) -> Iterator[Mapping[str, Columns]]:
    """Yield the terms to fit: a term that may be 0 is fitted, and left out.

    An entropy bonus may be a mean over tokens whatever the aggregation of the other terms is.
    """
    choices: list[list[tuple[str, Columns]]] = []
    for term in TERMS:
        names = dict.fromkeys((aggregation, "token_mean") if term == "entropy" else (aggregation,))
        filled = [(term, forms) for name in names if (forms := columns[term, name][0])]
        choices.append(filled + [(term, {})] * (term in vanishing))
    for choice in product(*choices):
        yield {term: forms for term, forms in choice if forms}


def _distinct_columns(steps: Sequence[Mapping[str, float]], noise: float) -> tuple[Columns, bool]:
    """Return forms whose values differ, and whether there is one with values below the noise."""
    having = [step for step in steps if step]  # in the others its coefficient is 0
    names = [name for name in (having[0] if having else ()) if all(name in s for s in having)]
    columns: dict[str, np.ndarray] = {}
    may_vanish = False
    for name in names:
        column = np.array([step.get(name, 0.0) for step in steps])
        if not np.isfinite(column).all():
            continue
        is_small = bool(np.abs(column).max() <= noise)
        may_vanish = may_vanish or is_small
        if not is_small and all(np.abs(column - c).max() >= noise for c in columns.values()):
            columns[name] = column
    return columns, may_vanish


def _fit_columns(
    columns: Mapping[str, Columns], loss: Float[np.ndarray, "S"], aggregation: str, noise: float
) -> list[Fit]:
    """Return the fits of all combinations of the terms' forms, computed together."""
    num_free = len(loss) - len(columns)
    if num_free < MIN_FREE:
        return []
    if not columns:  # every term may be 0: then the loss shows none
        sigma = max(float(np.linalg.norm(loss) / np.sqrt(num_free)), noise)
        return [Fit({}, aggregation, {}, {}, sigma)]
    combinations = list(product(*columns.values()))
    matrices = np.array(
        [[columns[n][f] for n, f in zip(columns, forms, strict=True)] for forms in combinations]
    ).transpose(0, 2, 1)
    lengths = np.linalg.norm(matrices, axis=1)
    unit = matrices / lengths[:, None]
    singular = np.linalg.svd(unit, compute_uv=False)
    inverse = np.linalg.pinv(unit, rcond=1 / MAX_CONDITION)
    coefs = np.einsum("mcs,s->mc", inverse, loss) / lengths
    rest = np.linalg.norm(loss - np.einsum("msc,mc->ms", matrices, coefs), axis=1)
    sigma = np.maximum(rest / np.sqrt(num_free), noise)
    errors = sigma[:, None] * np.linalg.norm(inverse, axis=2) / lengths
    return [
        Fit(
            forms=dict(zip(columns, forms, strict=True)),
            aggregation=aggregation,
            coefs=dict(zip(columns, coefs[m].tolist(), strict=True)),
            errors=dict(zip(columns, errors[m].tolist(), strict=True)),
            sigma=float(sigma[m]),
        )
        for m, forms in enumerate(combinations)
        if singular[m, 0] < MAX_CONDITION * singular[m, -1]
    ]
