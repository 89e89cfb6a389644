"""Identifies the loss of a run from recorded numbers: which terms it contains, with which signs.

The recorded loss of the recent steps is fitted by least squares to

    p * policy term + a * kl_coef * KL term - b * entropy_coef * entropy

for every combination of a form of each term and an aggregation. In a healthy run p, a and b are 1,
or one common factor if the loss is reported in another scale. A sign is concluded only if every
combination that fits about as well as the best one agrees. The value of a loss shows nothing about
its gradient: a term of the right sign may still be detached.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any

from klinic.checks.base import Case
from klinic.checks.loss_fit import Fit, fit_combinations
from klinic.checks.loss_values import RATIO_OF_1, LossMeasure, LossValues
from klinic.evidence.record import StepRecord
from klinic.maths.surrogate import SURROGATES

LOSS_FIELDS = (
    *("facts.loss", "facts.entropy_coef", "facts.loss_denominator", "record.loss_denominator"),
    *("record.advantage", "record.token_advantage", "record.logp", "record.logp_old"),
    *("record.logp_ref", "record.logp_sampler", "record.kl_exact", "record.entropy"),
    *("record.loss_mask", "record.row_offsets"),
    *("metrics.discarded", "metrics.reward_scale", "run.loss"),
)
"""What `identify_loss` reads, with the coefficient and the name of the KL term."""

NUM_STEPS = 10  # recent steps: a fault that begins in the middle of a run fills them soon
MIN_STEPS = 3
MAX_TIMES_BEST = 6.0  # residuals within this factor of the best one fit about as well
MAX_ERROR = 0.02  # standard error of a coefficient: 0, 1 and -1 are 50 of them apart
MIN_ERRORS = 5.0  # standard errors of a coefficient that is not 0
MAX_SCALE_ERROR = 0.02  # a coefficient this close to 1 or -1 shows that the scale is 1
ON_POLICY = 0.02  # nats: bf16 kernels of other shapes leave less between logp and logp_old
MAX_DEVIATION = 0.05  # of a coefficient from 0, 1 or -1: others are no loss that is known


class Sign(StrEnum):
    """The sign with which a term enters the loss."""

    RIGHT = "right"
    WRONG = "wrong"
    ABSENT = "absent"


SIGN_OF_COEF = {1: Sign.RIGHT, 0: Sign.ABSENT, -1: Sign.WRONG}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFit:
    """The terms of the loss, as far as recorded numbers show them."""

    signs: Mapping[str, Sign]
    """Of `policy`, `kl` and `entropy`; a term that cannot be identified is left out."""
    coefs: Mapping[str, float]
    """Of the combination that fits best."""
    residual: float
    """Standard deviation of the loss from that combination."""
    num_steps: int
    ratio_is_1: bool
    """Whether the policy term is identified, and every combination takes its ratio as 1."""
    description: str
    """The forms of that combination."""

    @property
    def sentence(self) -> str:
        """The fit as part of a sentence."""
        names = {"policy": "the policy term", "kl": "the KL term", "entropy": "the entropy bonus"}
        terms = " and ".join(f"{self.coefs[n]:.3g} times {names[n]}" for n in self.coefs)
        return (
            f"the recorded loss of {self.num_steps} steps is {terms}, within {self.residual:.1g} "
            f"({self.description})"
        )


@dataclass(frozen=True, slots=True)
class _Declared:
    """Forms and aggregation that the run states; None if it does not."""

    policy: str | None
    kl: str | None
    aggregation: str | None


def identify_loss(case: Case) -> LossFit | None:
    """Return the terms of the loss of the recent steps; None if the records do not show them."""
    loss = case.run.get("loss")
    stated: Mapping[str, Any] = loss if isinstance(loss, Mapping) else {}
    measure = LossMeasure(clip_range=_clip_range(stated), importance_cap=_importance_cap(stated))
    records = [r for r in case.recent_records[-NUM_STEPS:] if _is_plain(case, r)]
    if case.record not in records:
        return None
    values = [case.measure_once(measure, record) for record in records]
    usable = tuple(v for v in values if v is not None)
    if values[-1] is None or len(usable) < MIN_STEPS:
        return None
    return _fit_steps(usable, _declared_forms(stated, case.run.get("estimator")))


def _clip_range(stated: Mapping[str, Any]) -> tuple[float, float] | None:
    low, high = stated.get("clip_low"), stated.get("clip_high")
    if not isinstance(low, int | float) or not 0 <= low <= 1:
        return None
    return float(low), float(high) if isinstance(high, int | float) and high >= 0 else float(low)


def _importance_cap(stated: Mapping[str, Any]) -> float | None:
    cap = stated.get("importance_cap")
    return float(cap) if isinstance(cap, int | float) and cap > 0 else None


def _is_plain(case: Case, record: StepRecord) -> bool:
    """Return whether a step was applied, with the policy term at full strength and no teacher."""
    line = case.metrics.get(record.step, {})
    if record.facts.get("teacher_coef"):  # another term of the recorded loss
        return False
    return not line.get("discarded") and line.get("reward_scale") in (None, 1)


def _declared_forms(stated: Mapping[str, Any], estimator: object) -> _Declared:
    """Return what the run states about its loss, in the names of `loss_values`."""
    if stated.get("overridden") is True:  # by a loss of which nothing is known
        return _Declared(None, None, None)
    name, aggregation = stated.get("name"), stated.get("aggregation")
    surrogate = SURROGATES.get(str(name))
    if aggregation is None and surrogate is not None:
        aggregation = surrogate.aggregation
    policy = {"gspo": "clipped sequence ratio", "cispo": "up to"}.get(str(name))
    if surrogate is not None and policy is None:
        policy = "ratio clipped"
    kl = {"k3_plus": "k3", "k3_ratio": "k3", "k3_reversed": "k3 reversed", "abs": "|k1|"}
    kl |= {name: name for name in ("k1", "k2", "k3")}
    return _Declared(policy, kl.get(str(estimator)), aggregation)


@lru_cache(maxsize=4)
def _fit_steps(steps: tuple[LossValues, ...], declared: _Declared) -> LossFit | None:
    # forms that the run states are the only ones, if they fit
    stated = partial(_is_stated, declared, _is_on_policy(steps))
    fits = fit_combinations(steps, stated) or fit_combinations(steps, lambda *_: True)
    sigma = min((fit.sigma for fit in fits), default=0.0)
    equal = [fit for fit in fits if fit.sigma <= MAX_TIMES_BEST * sigma]
    if not equal:
        return None
    best = min(equal, key=lambda fit: (fit.sigma, len(fit.coefs)))
    signs = [_signs(fit) for fit in equal]
    forms = [form for name, form in best.forms.items() if name != "entropy"]
    common = {n: sign for n, sign in signs[0].items() if all(s.get(n) == sign for s in signs)}
    takes_1 = all(fit.forms.get("policy") == RATIO_OF_1 for fit in equal)
    return LossFit(
        signs=common,
        coefs=best.coefs,
        residual=best.sigma,
        num_steps=len(steps),
        ratio_is_1=takes_1 and common.get("policy") is Sign.RIGHT,
        description=f"{', '.join(forms)}; {best.aggregation.replace('_', ' ')}",
    )


def _signs(fit: Fit) -> Mapping[str, Sign]:
    """Return the signs of the terms whose coefficients are determined."""
    signs: dict[str, Sign] = {}
    if not fit.coefs:
        return signs
    scale = _scale(fit)
    for term, coef in fit.coefs.items():
        if fit.errors[term] > MAX_ERROR * scale:
            continue
        nearest = round(coef / scale)
        if abs(nearest) > 1 or abs(coef / scale - nearest) > MAX_DEVIATION:
            return {}
        signs[term] = SIGN_OF_COEF[nearest]
    return signs


def _scale(fit: Fit) -> float:
    """Return the scale of the reported loss: 1 if a coefficient is 1 or -1, or if all are 0."""
    coefs = {term: abs(coef) for term, coef in fit.coefs.items()}
    is_one = any(abs(coef - 1) < MAX_SCALE_ERROR for coef in coefs.values())
    largest = max(coefs, key=lambda term: coefs[term])
    is_zero = coefs[largest] < MIN_ERRORS * fit.errors[largest]
    return 1.0 if is_one or is_zero else coefs[largest]


def _is_on_policy(steps: tuple[LossValues, ...]) -> bool:
    return max(step.log_ratio for step in steps) < ON_POLICY


def _is_stated(
    declared: _Declared, on_policy: bool, term: str, form: str, aggregation: str
) -> bool:
    """Return whether a form agrees with what the run states."""
    if declared.aggregation not in (None, aggregation) and term != "entropy":
        return False
    match term:
        case "policy":
            # the ratio may be rounding: a loss may then as well take it as 1
            is_one = on_policy and form == RATIO_OF_1
            return declared.policy is None or declared.policy in form or is_one
        case "kl":
            return declared.kl is None or declared.kl in form
    return True
