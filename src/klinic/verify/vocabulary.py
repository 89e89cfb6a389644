"""Identifies a function of logits at single rows of the vocabulary, up to 151,936 tokens.

A function of logits that ignores the sampled token has one value per row of the vocabulary, and its
gradient there is exact: no enumeration is needed. In the logits, write p for the policy and k1 for
log p - log q. The gradient of a sum over the vocabulary is p (u - sum p u), with the pull u:

    exact   KL(p || q): u = k1
    bucket  KL of some tokens and a rest bucket: u = k1 of the token, or of the bucket

Tokens are compared by their pull and not by p times it: a token of probability 1e-9 has no weight
alone, but a vocabulary has 100,000 of them.

    realistic rows  vocabularies of 4,096 to 151,936 tokens, near the reference and far from it
    extreme rows    one token with all pairs of log-probs from 0 to -60, the rest ordinary
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from klinic.errors import FunctionError
from klinic.verify.identify import GradientIdentity, worst_error
from klinic.verify.loading import UserFunction
from klinic.verify.row_pulls import derivative

VOCAB_SIZES = (4096, 50_257, 151_936)
EXTREME_VOCAB_SIZE = VOCAB_SIZES[0]
EXTREME_LOGPS = (-0.05, -0.7, -3.0, -6.0, -10.0, -14.0, -18.0, -22.0, -26.0, -30.0, -45.0, -60.0)
NUM_POSITIONS = 2
PULL_TOLERANCE = 0.01
MAX_GRADIENT_ERROR = 1e-3
IDENTITY_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}

Kind = Literal["exact", "bucket"]
Logits = Float[Tensor, "B L V"]


@dataclass(frozen=True, kw_only=True)
class VocabularyMeasurement:
    """The gradient of a function of logits at single rows of the vocabulary, identified."""

    kind: Kind
    scale: float
    scale_by_size: dict[int, float]
    error_by_size: dict[int, float]
    """Norm of the error of the gradient at realistic rows, relative to the gradient."""
    departs_below: float | None
    """It departs where a token's log-prob under policy or reference is below this."""
    departs_in_float32_below: float | None
    is_finite_if_certain: bool
    """Whether float32 is finite where one token has all the probability."""
    is_finite_in_float32: bool
    """Whether float32 is finite at realistic rows of every size."""

    @property
    def identity(self) -> GradientIdentity:
        """The gradient as a target of the worlds."""
        return GradientIdentity(
            target="reverse_token" if self.kind == "exact" else "bucket_token",
            scale=self.scale,
            error=worst_error(self.error_by_size.values()),
        )

    def is_identified(self, compute_dtype: torch.dtype) -> bool:
        """Whether it is a multiple of the KL, or of its bucketed form, at every size."""
        tolerance = IDENTITY_TOLERANCE.get(compute_dtype, 0.0)
        return self.scale != 0 and worst_error(self.error_by_size.values()) < tolerance

    @property
    def depends_on_size(self) -> bool:
        """Whether it is the KL at every size, with a multiple that changes with the size."""
        scales = [abs(scale) for scale in self.scale_by_size.values()]
        fits = worst_error(self.error_by_size.values()) < MAX_GRADIENT_ERROR
        return fits and max(scales) > 1.1 * min(scales)

    @property
    def is_within_tolerance(self) -> bool:
        """Whether it holds at every realistic row, and nowhere departs within reach."""
        return (
            worst_error(self.error_by_size.values()) < MAX_GRADIENT_ERROR
            and self.departs_below is None
            and self.departs_in_float32_below is None
            and self.is_finite_if_certain
            and self.is_finite_in_float32
            and not self.depends_on_size
        )


@dataclass(frozen=True, kw_only=True)
class _RowGradients:
    """The gradient of a function at rows of logits, with the log-probs to compare with."""

    logp: Logits
    logp_ref: Logits
    gradient: Logits
    value: Tensor

    @property
    def is_finite(self) -> bool:
        """Whether all values and gradients are finite."""
        return bool(self.value.isfinite().all() and self.gradient.isfinite().all())

    @property
    def pull(self) -> Logits:
        """The gradient per probability, u - sum p u."""
        return self.gradient / self.logp.exp()


def measure_vocabulary(function: UserFunction) -> VocabularyMeasurement:
    """Compare the function with the KL at rows of the vocabulary.

    Raises `FunctionError` where it fails: one that works only at toy sizes cannot train a model.
    """
    fits = [
        _fit_rows(_gradients(function, *_realistic_rows(size), torch.float64))
        for size in VOCAB_SIZES
    ]
    kind, scale = fits[0].kind, fits[0].scale
    return VocabularyMeasurement(
        kind=kind,
        scale=scale,
        scale_by_size={size: fit.scale for size, fit in zip(VOCAB_SIZES, fits, strict=True)},
        error_by_size={size: fit.error for size, fit in zip(VOCAB_SIZES, fits, strict=True)},
        departs_below=_departs_below(function, kind, scale, torch.float64),
        departs_in_float32_below=_departs_below(function, kind, scale, torch.float32),
        is_finite_if_certain=_is_finite_if_certain(function),
        is_finite_in_float32=all(
            _is_finite(function, *_realistic_rows(size)) for size in VOCAB_SIZES
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _RowFit:
    kind: Kind
    scale: float
    error: float


def _fit_rows(rows: _RowGradients) -> _RowFit:
    """Fit one multiple of the gradient of the KL, or of its bucketed form, to all rows."""
    shares = _shares_pull(rows, _fit_scale(rows, None))
    is_bucketed = shares if bool(shares.any()) else None
    expected = rows.logp.exp() * _expected_pull(rows, is_bucketed)
    scale = _fit_scale(rows, is_bucketed)
    error = (rows.gradient - scale * expected).norm(dim=-1) / expected.norm(dim=-1)
    kind: Kind = "exact" if is_bucketed is None else "bucket"
    return _RowFit(kind=kind, scale=scale, error=float(error.max()) / (abs(scale) or 1.0))


def ignores_tokens(function: UserFunction) -> bool:
    """Whether the values stay the same for other tokens; a failure counts as no."""
    if not function.takes_tokens:
        return True
    logits, logits_ref = _realistic_rows(VOCAB_SIZES[0])
    tokens = torch.arange(logits.shape[0] * NUM_POSITIONS).view(-1, NUM_POSITIONS)
    arrays = {"logits": logits, "logits_ref": logits_ref, "logp_old": -torch.ones(tokens.shape)}
    try:
        values = [function(arrays | {"tokens": tokens + shift}) for shift in (0, 7)]
    except FunctionError:
        return False
    return torch.equal(*values)


@cache
def _realistic_rows(size: int) -> tuple[Logits, Logits]:
    """Return logits of policy and reference: spread like those of a language model.

    Two completions of two tokens: a flat row near the reference, a peaked one near it, and each
    farther away.
    """
    rng = torch.Generator().manual_seed(size)

    def sample_normal() -> Tensor:
        return torch.randn(2, NUM_POSITIONS, size, generator=rng, dtype=torch.float64)

    spread = torch.tensor([2.0, 4.0], dtype=torch.float64)[None, :, None]
    drift = torch.tensor([0.3, 1.5], dtype=torch.float64)[:, None, None]
    logits = spread * sample_normal()
    return logits, logits + drift * sample_normal()


def _extreme_rows() -> Iterator[tuple[Logits, Logits]]:
    """Yield rows with one token at every pair of log-probs, those of larger ones first."""
    levels = torch.tensor(EXTREME_LOGPS, dtype=torch.float64)
    # an even rest, so that no other token of the row is rare
    rest, rest_ref = (
        (rows[:1, :1, :-1] / 4).log_softmax(-1) for rows in _realistic_rows(EXTREME_VOCAB_SIZE)
    )
    for smaller in EXTREME_LOGPS:
        larger = levels[levels >= smaller]
        policy = torch.cat([torch.full_like(larger, smaller), larger])
        reference = torch.cat([larger, torch.full_like(larger, smaller)])
        yield _with_token(policy, rest), _with_token(reference, rest_ref)


def _with_token(logp: Float[Tensor, "N"], rest: Float[Tensor, "1 1 W"]) -> Float[Tensor, "N L V"]:
    """Return rows of one token each: the token, then the rest with the remaining probability."""
    left = (-torch.expm1(logp)).log()
    rows = torch.cat([logp[:, None, None], rest + left[:, None, None]], dim=-1)
    return rows.expand(-1, NUM_POSITIONS, -1)


def _gradients(
    function: UserFunction, logits: Logits, logits_ref: Logits, dtype: torch.dtype
) -> _RowGradients:
    leaf = logits.to(dtype).clone().requires_grad_()
    logits_ref = logits_ref.to(dtype)
    logp = leaf.detach().double().log_softmax(-1)
    arrays = {"logits": leaf, "logits_ref": logits_ref, "logp_old": logp[..., 0].to(dtype)}
    value = function(arrays)
    return _RowGradients(
        logp=logp,
        logp_ref=logits_ref.double().log_softmax(-1),
        gradient=derivative(value, leaf).double(),
        value=value.detach(),
    )


def _fit_scale(rows: _RowGradients, is_bucketed: Tensor | None) -> float:
    expected = rows.logp.exp() * _expected_pull(rows, is_bucketed)
    return float((rows.gradient * expected).sum() / (expected * expected).sum())


def _shares_pull(rows: _RowGradients, scale: float) -> Tensor:
    """Return which tokens of each row have one common pull: those of a rest bucket.

    Pulls are in nats times the scale.
    """
    pull = rows.pull
    common = pull.median(dim=-1, keepdim=True).values
    shares = (pull - common).abs() < 1e-4 * (common.abs() + abs(scale))
    # fewer than half of the tokens: no bucket, but chance or a row of equal pulls
    is_bucketed = shares.sum(-1, keepdim=True) > pull.shape[-1] // 2
    return shares & is_bucketed


def _expected_pull(rows: _RowGradients, is_bucketed: Tensor | None) -> Logits:
    k1 = rows.logp - rows.logp_ref
    if is_bucketed is not None:
        mass = (rows.logp.exp() * is_bucketed).sum(-1, keepdim=True)
        mass_ref = (rows.logp_ref.exp() * is_bucketed).sum(-1, keepdim=True)
        k1 = torch.where(is_bucketed, (mass / mass_ref).log(), k1)
    return k1 - (rows.logp.exp() * k1).sum(-1, keepdim=True)


def _departs_below(
    function: UserFunction, kind: Kind, scale: float, dtype: torch.dtype
) -> float | None:
    """Return the rarest log-prob of the first row where a pull is off by more than 1%."""
    for logits, logits_ref in _extreme_rows():
        try:
            rows = _gradients(function, logits, logits_ref, dtype)
        except FunctionError:
            return EXTREME_LOGPS[0]
        is_bucketed = _shares_pull(rows, scale) if kind == "bucket" else None
        expected = scale * _expected_pull(rows, is_bucketed)
        limit = PULL_TOLERANCE * (abs(scale) + expected.abs())
        departs = ~((rows.pull - expected).abs() <= limit).all(-1)  # NaN departs
        if bool(departs.any()):
            rarest = torch.minimum(rows.logp, rows.logp_ref).amin(-1)
            return round(float(rarest[departs].max()), 1)
    return None


def _is_finite_if_certain(function: UserFunction) -> bool:
    certain = torch.zeros(1, NUM_POSITIONS, EXTREME_VOCAB_SIZE, dtype=torch.float64)
    certain[..., 0] = 60.0
    return _is_finite(function, certain, certain.clone())


def _is_finite(function: UserFunction, logits: Logits, logits_ref: Logits) -> bool:
    try:
        return _gradients(function, logits, logits_ref, torch.float32).is_finite
    except FunctionError:
        return False
