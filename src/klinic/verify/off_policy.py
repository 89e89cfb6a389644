"""Names the importance sampling of a function that takes `logp_old`.

Write m for the policy that sampled, r_t for p / m at token t. These importance samplings are right,
each for its own gradient:

    token ratio         r_t k1_t S_t: the token-level gradient at the prefixes that m visits
    sequence ratio      all r multiplied: the gradient of the KL between completions of the policy
    per-decision ratio  r_1 .. r_s for the k1 of token s: the same with less noise
    prefix ratio        r_1 .. r_t k1_t S_t: the token-level gradient at the policy's own prefixes

Each may hold its ratio at a cap of 1.1 or more: then it is exact below the cap, and above it pulls
with the weight of the cap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from klinic.maths.kl_estimators import Gradient
from klinic.verify.expectation import GradientMoments
from klinic.verify.identify import GradientIdentity, Targets, identify_gradient
from klinic.verify.loading import UserFunction
from klinic.verify.row_pulls import evaluate_pulls

Form = Literal["token", "sequence", "per_decision", "prefix"]

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
MIN_CAP = 1.1  # a lower one is active in the worlds of a slight drift


@dataclass(frozen=True, kw_only=True)
class OffPolicyMeasurement:
    """The expected gradient on completions of an older policy, and how the ratio enters."""

    identity: GradientIdentity
    form: Form | None
    """None unless the gradient is a corrected one."""
    ratio_cap: float | None
    """The value at which the ratio is held."""

    @property
    def gradient(self) -> Gradient:
        """The public name of the gradient."""
        return self.identity.gradient

    @property
    def is_corrected(self) -> bool:
        """Whether the gradient is right for the older policy, below the cap if there is one."""
        return self.form is not None


def identify_off_policy(
    function: UserFunction,
    large: tuple[Sequence[GradientMoments], Sequence[Targets]],
    slight: tuple[Sequence[GradientMoments], Sequence[Targets]],
    *,
    tolerance: float,
) -> OffPolicyMeasurement:
    """Name the gradient in worlds of a large drift; with a cap, in those of a slight drift."""
    identity = identify_gradient(*large, tolerance=tolerance)
    if _is_corrected(identity):
        return OffPolicyMeasurement(
            identity=identity, form=_form(function, identity), ratio_cap=None
        )
    below_cap = identify_gradient(*slight, tolerance=max(tolerance, SLIGHT_TOLERANCE))
    cap = _find_cap(function) if _is_corrected(below_cap) else None
    if cap is None:
        return OffPolicyMeasurement(identity=identity, form=None, ratio_cap=None)
    return OffPolicyMeasurement(identity=below_cap, form=_form(function, below_cap), ratio_cap=cap)


def _is_corrected(identity: GradientIdentity) -> bool:
    return identity.target in CORRECTED_TARGETS and identity.scale > 0


def _form(function: UserFunction, identity: GradientIdentity) -> Form:
    """Tell the ratios apart by the effect of the last token's ratio on the first token's pull."""
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


def _find_cap(function: UserFunction) -> float | None:
    """Return the value c if the weight is min(ratio, c) from ratio exp(-10) to exp(10)."""
    log_ratio = torch.arange(-10.0, 10.01, 0.05, dtype=torch.float64)
    logp, logp_ref = (row.expand(len(log_ratio), -1) for row in _row())
    logp_old = logp.clone()
    logp_old[:, 1] -= log_ratio  # a positive log-prob is of no matter: only the ratio enters
    moved = logp_ref.clone()
    moved[:, 1] -= 1.0
    pull, moved_pull = (
        evaluate_pulls(function, logp, ref, logp_old).pull[:, 1].double()
        for ref in (logp_ref, moved)
    )
    weight = moved_pull - pull
    cap = float(weight[-1])
    expected = log_ratio.exp().clamp(max=cap)
    is_weight = torch.allclose(weight, expected, rtol=1e-4, atol=1e-6)
    # the weight multiplies k1 of the token, of this and all later tokens, or of the row
    multiplied = pull / expected
    sums = (ROW_K1[1], sum(ROW_K1[1:]), sum(ROW_K1))
    is_k1 = any(bool(((multiplied - k1).abs() < 1e-4).all()) for k1 in sums)
    return cap if cap >= MIN_CAP and is_weight and is_k1 else None
