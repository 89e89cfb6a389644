"""Names the importance sampling of a function that takes `logp_old`.

Write m for the policy that sampled, r_t for p / m at token t. These importance samplings are right,
each for its own gradient:

    token ratio         r_t k1_t S_t: the token-level gradient at the prefixes that m visits
    sequence ratio      all r multiplied: the gradient of the KL between completions of the policy
    per-decision ratio  r_1 .. r_s for the k1 of token s: the same with less noise
    prefix ratio        r_1 .. r_t k1_t S_t: the token-level gradient at the policy's own prefixes

Each may hold its ratio at a cap of 1.1 or more: then it is exact below the cap, and above it pulls
with the weight of the cap. `ratio_range.py` finds caps and all other weights, beyond the ratios of
the worlds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from klinic.maths.kl_estimators import Gradient
from klinic.verify.expectation import GradientMoments
from klinic.verify.identify import GradientIdentity, Targets, identify_gradient
from klinic.verify.loading import UserFunction
from klinic.verify.ratio_range import TOLERANCE, Form, RatioRange, scan_ratios
from klinic.verify.row_pulls import evaluate_pulls

CORRECTED_TARGETS = (
    "reverse_token_off_policy",
    "bucket_token_off_policy",
    "reverse_sequence",
    "reverse_token",
)
SLIGHT_DRIFT = 0.004  # ratios within 2% of 1: below any cap that is not a mistake
LARGE_DRIFT = 0.4
SLIGHT_TOLERANCE = 1e-6  # the gradients differ by the drift itself, 1e-3
ROW_K1 = (0.37, -0.83, 0.59)  # sums of its parts differ, so that a future sum is recognisable


@dataclass(frozen=True, kw_only=True)
class OffPolicyMeasurement:
    """The expected gradient on completions of an older policy, and how the ratio enters."""

    identity: GradientIdentity
    form: Form | None
    """None unless the gradient is a corrected one, at least for ratios near 1."""
    ratio_range: RatioRange | None
    """Where the weight is not the ratio; None without a form or without a ratio."""

    @property
    def gradient(self) -> Gradient:
        """The public name of the gradient."""
        return self.identity.gradient

    @property
    def is_corrected(self) -> bool:
        """Whether the gradient is right for the older policy, below the cap if there is one."""
        return self.form is not None and (self.ratio_range is None or self.ratio_range.is_right)

    @property
    def ratio_cap(self) -> float | None:
        """The value at which the ratio is held."""
        return None if self.ratio_range is None else self.ratio_range.cap

    @property
    def is_reversed(self) -> bool:
        """Whether the weight has the wrong sign at some ratio."""
        return self.ratio_range is not None and self.ratio_range.reverses_at is not None


def identify_off_policy(
    function: UserFunction,
    large: tuple[Sequence[GradientMoments], Sequence[Targets]],
    slight: tuple[Sequence[GradientMoments], Sequence[Targets]],
    *,
    tolerance: float,
    compute_dtype: torch.dtype,
) -> OffPolicyMeasurement:
    """Name the gradient in worlds of a large drift, or else near a ratio of 1; scan the ratios."""
    identity = identify_gradient(*large, tolerance=tolerance)
    near_one = identity
    if not _is_corrected(identity):
        near_one = identify_gradient(*slight, tolerance=max(tolerance, SLIGHT_TOLERANCE))
    if not _is_corrected(near_one):
        return OffPolicyMeasurement(identity=identity, form=None, ratio_range=None)
    form = _form(function, near_one)
    # a function of whole rows of logits needs no ratio
    has_ratio = near_one.target != "bucket_token_off_policy" and _reads_ratio(function)
    ratio_range = (
        scan_ratios(function, form, near_one.scale, compute_dtype)
        if has_ratio and compute_dtype in TOLERANCE
        else None
    )
    if near_one is not identity and (
        ratio_range is None or (ratio_range.is_right and ratio_range.cap is None)
    ):
        # the worlds of a large drift contradict the scan
        return OffPolicyMeasurement(identity=identity, form=None, ratio_range=None)
    is_right = ratio_range is None or ratio_range.is_right
    return OffPolicyMeasurement(
        identity=near_one if is_right else identity, form=form, ratio_range=ratio_range
    )


def _is_corrected(identity: GradientIdentity) -> bool:
    return identity.target in CORRECTED_TARGETS and identity.scale > 0


def _form(function: UserFunction, identity: GradientIdentity) -> Form:
    """Distinguish the ratios by the effect of the last token's ratio on the first token's pull."""
    if identity.target in {"reverse_token_off_policy", "bucket_token_off_policy"}:
        return "token"
    logp, logp_ref = _row()
    shift = torch.zeros_like(logp)
    shift[0, -1] = 0.01
    before, after = (
        evaluate_pulls(function, logp, logp_ref, logp - moved).pull[0, 0]
        for moved in (torch.zeros_like(shift), shift)
    )
    multiplies_all = bool(torch.isclose(after, before * shift[0, -1].exp(), rtol=1e-5))
    if multiplies_all:
        return "sequence"
    return "prefix" if identity.target == "reverse_token" else "per_decision"


def _row() -> tuple[Tensor, Tensor]:
    k1 = torch.tensor([ROW_K1], dtype=torch.float64)
    logp = torch.full_like(k1, -2.0)
    return logp, logp - k1


def _reads_ratio(function: UserFunction) -> bool:
    """Whether the pulls change with `logp_old`."""
    logp, logp_ref = _row()
    pulls = [evaluate_pulls(function, logp, logp_ref, logp - shift).pull for shift in (0.0, 0.01)]
    return not torch.equal(*pulls)
