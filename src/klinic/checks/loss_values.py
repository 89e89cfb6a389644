"""Values of the terms that the loss of a step may be made of, computed from its record.

A term has a form per token and an aggregation over tokens. Forms of one quantity agree in value
where they cannot be distinguished: all ratios are 1 on policy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from klinic.checks.measures import as_float64, float64_column, rms_logp_gap, row_numbers
from klinic.evidence.record import StepRecord
from klinic.maths import kl
from klinic.maths.masked import apply_mask, sequence_mean, token_mean
from klinic.maths.ratio import clip, sequence_log_ratio

MAX_LOG_RATIO = 20.0  # nats: exp stays finite, and no such ratio is trained on
SAMPLER_CAP = 2.0  # of the importance weight against the sampler
USUAL_CLIPS = ((0.2, 0.2), (0.2, 0.28))  # if the run does not state its own: PPO, DAPO
SEQUENCE_CLIP = (3e-4, 4e-4)  # GSPO

RATIO_OF_1 = "ratio of 1"  # the form of a loss that takes the current log-probs as the old ones

Terms = Mapping[str, Float[np.ndarray, "N"]]
Values = Mapping[tuple[str, str], float]
"""Value of a term by its form and its aggregation."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossValues:
    """The recorded loss of a step, and the values of the terms that it may contain."""

    loss: float
    policy: Values
    kl: Values
    """Times the coefficient; empty without a KL term."""
    entropy: Values
    """Minus the coefficient times the entropy; empty without an entropy term."""
    advantage_size: float
    """Mean absolute advantage of the trained tokens: rounding of the loss is relative to it."""
    log_ratio: float
    """Root mean square of logp - logp_old of the trained tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMeasure:
    """Computes the values of a record, for `Case.measure_once`; None if a column is missing."""

    clip_range: tuple[float, float] | None
    """As the run states it."""
    importance_cap: float | None = None
    """Of the weight against the sampler that multiplies the policy term, as the run states it."""

    def __call__(self, record: StepRecord) -> LossValues | None:
        """Return the values of a record."""
        loss, kl_coef, entropy_coef = (
            _number(record, name) for name in ("loss", "kl_coef", "entropy_coef")
        )
        if kl_coef is None and record.logp_ref is None:  # a KL term needs a reference
            kl_coef = 0.0
        if loss is None or kl_coef is None or kl_coef < 0 or not _has_columns(record):
            return None
        if (kl_coef and record.logp_ref is None) or (entropy_coef and record.entropy is None):
            return None
        advantage = _token_advantage(record) * _sampler_weight(record, self.importance_cap)
        mask = record.loss_mask
        columns = [advantage, *(float64_column(record, n) for n in _columns_of(record))]
        if not mask.any() or not all(np.isfinite(column[mask]).all() for column in columns):
            return None
        weights = _aggregations(record)
        kl_terms = _kl_terms(record) if kl_coef else {}
        entropy_terms = {"entropy": _trained(record, "entropy")} if entropy_coef else {}
        return LossValues(
            loss=loss,
            policy=_sums(
                _policy_terms(record, apply_mask(advantage, mask), self.clip_range), weights, 1.0
            ),
            kl=_sums(kl_terms, weights, kl_coef),
            entropy=_sums(entropy_terms, weights, -(entropy_coef or 0.0)),
            advantage_size=float(np.abs(advantage[mask]).mean()),
            log_ratio=rms_logp_gap(record, "logp", "logp_old"),
        )


def _trained(record: StepRecord, name: str) -> Float[np.ndarray, "N"]:
    """Return a column, 0 at tokens that are not trained on."""
    return np.asarray(apply_mask(float64_column(record, name), record.loss_mask))


def _number(record: StepRecord, name: str) -> float | None:
    value = record.facts.get(name)
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else None


def _has_columns(record: StepRecord) -> bool:
    has_advantage = record.advantage is not None or record.token_advantage is not None
    return has_advantage and record.logp is not None and record.logp_old is not None


def _columns_of(record: StepRecord) -> list[str]:
    names = ["logp", "logp_old"]
    names += ["logp_ref"] if record.logp_ref is not None and record.facts.get("kl_coef") else []
    return names + (["entropy"] if record.facts.get("entropy_coef") else [])


def _token_advantage(record: StepRecord) -> Float[np.ndarray, "N"]:
    if record.token_advantage is not None:
        return float64_column(record, "token_advantage")
    by_row: np.ndarray = as_float64(record.advantage)
    return np.asarray(by_row[row_numbers(record)])


def _sampler_weight(record: StepRecord, cap: float | None) -> Float[np.ndarray, "N"]:
    """Return the truncated importance weight of each token; 1 where the run has none."""
    if cap is None or record.logp_sampler is None:
        return np.ones(record.num_tokens)
    log_weight = float64_column(record, "logp_old") - float64_column(record, "logp_sampler")
    log_weight = np.where(np.isfinite(log_weight), log_weight, 0.0)
    return np.asarray(np.minimum(np.exp(np.clip(log_weight, -MAX_LOG_RATIO, MAX_LOG_RATIO)), cap))


def _aggregations(record: StepRecord) -> Mapping[str, Float[np.ndarray, "N"]]:
    """Return the weights of the trained tokens by aggregation.

    A constant denominator that is not recorded leaves a factor that is the same in every step.
    """
    mask, offsets = record.loss_mask, record.row_offsets
    total = record.facts.get("loss_denominator")
    if record.loss_denominator is not None:
        divisor = np.asarray(record.loss_denominator, np.float64)[row_numbers(record)]
    elif isinstance(total, int | float) and total > 0:
        divisor = np.full(record.num_tokens, float(total))
    else:
        divisor = np.full(record.num_tokens, float(np.unique(row_numbers(record)[mask]).size))
    return {
        "token_mean": token_mean(mask, dtype=np.float64),
        "sequence_mean": sequence_mean(mask, offsets, dtype=np.float64),
        "constant": np.where(mask & (divisor > 0), 1.0 / np.where(divisor > 0, divisor, 1.0), 0.0),
    }


def _sums(terms: Terms, weights: Mapping[str, Any], coef: float) -> Values:
    """Return the weighted sum of each term by each aggregation, times a coefficient."""
    return {
        (form, aggregation): coef * float(x @ weight)
        for form, x in terms.items()
        for aggregation, weight in weights.items()
    }


def _policy_terms(
    record: StepRecord, advantage: Float[np.ndarray, "N"], clip_range: tuple[float, float] | None
) -> Terms:
    logp, old = _trained(record, "logp"), _trained(record, "logp_old")
    log_ratio = np.clip(logp - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = np.exp(log_ratio)
    by_row = np.exp(
        sequence_log_ratio(
            logp=old + log_ratio,
            logp_old=old,
            loss_mask=record.loss_mask,
            row_offsets=record.row_offsets,
        )
    )
    terms = {}
    for low, high in (clip_range,) if clip_range else USUAL_CLIPS:
        clipped = clip(ratio, clip_low=low, clip_high=high)
        weight = np.minimum(ratio, 1 + high)
        terms[f"ratio clipped to {low:g}, {high:g}"] = -np.minimum(
            ratio * advantage, clipped * advantage
        )
        terms[f"weight up to {1 + high:g}"] = -weight * advantage
        terms[f"log-prob with a weight up to {1 + high:g}"] = -weight * advantage * logp
    low, high = clip_range or SEQUENCE_CLIP
    clipped = clip(by_row, clip_low=low, clip_high=high)
    return {
        **terms,
        "clipped sequence ratio": -np.minimum(by_row * advantage, clipped * advantage),
        "ratio": -ratio * advantage,
        "sequence ratio": -by_row * advantage,
        RATIO_OF_1: -advantage,
        "log-prob": -advantage * logp,
    }


def _kl_terms(record: StepRecord) -> Terms:
    logp, old = _trained(record, "logp"), _trained(record, "logp_old")
    both = {"logp_p": logp, "logp_q": _trained(record, "logp_ref")}
    k1, k3 = kl.k1(**both), kl.k3(**both)
    swapped = {"logp_p": both["logp_q"], "logp_q": logp}
    terms = {
        "k1": k1,
        "k2": kl.k2(**both),
        "k3": k3,
        "|k1|": kl.absolute(**both),
        "k3 reversed": kl.k3(**swapped),
        "k1 logp": k1 * logp,
        "k1 at the old policy": old - both["logp_q"],
    }
    weights = {"ratio": np.exp(np.clip(logp - old, -MAX_LOG_RATIO, MAX_LOG_RATIO))}
    if record.logp_sampler is not None:
        sampler = _trained(record, "logp_sampler")
        sampler = np.where(np.isfinite(sampler), sampler, old)
        uncapped = np.exp(np.clip(logp - sampler, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        weights |= {"weight": np.minimum(uncapped, SAMPLER_CAP), "uncapped weight": uncapped}
    for name, weight in weights.items():
        terms |= {f"{name} k1": weight * k1, f"{name} k3": weight * k3}
    if record.kl_exact is not None:
        exact = _trained(record, "kl_exact")
        if np.isfinite(exact).all():
            terms["exact KL"] = exact
    return terms
