"""Rules that adapt the coefficient of the KL term, as pure functions of a small state.

    name         rule                                                         source
    fixed        coef stays                                                   -
    (warm-up)    coef * min(1, step / warmup_steps), on top of any rule       -
    band         x 1.5 above 1.5 target, x 0.75 below 0.5 target              PPO's rule, softened
    ziegler      coef * (1 + clip(kl / target - 1, +-0.2) * rate)             Ziegler et al. (2019)
    dual_ascent  max(0, coef + step * (kl - target))                          Lagrange multiplier
    log_pi       ln coef + kp (h g r / T + change of x), see below            PI control, log space

The measured KL is the mean of k1 at `logp_old`, in nats per token. The KL integrates the policy's
updates, so a rule that multiplies at every step is an integrator on an integrator: it oscillates.
Change little per step, or add the proportional part of `log_pi`.

Symbols of `log_pi`, for a smoothed KL m:

    r = m / target - 1, clipped to [-1, 3]   the error that is integrated; unbiased, as m is
    x = ln(m / target), at least -1          its change counters a KL that moves
    n                                        measurements off target (15%), on one side
    T = max(20, longest n / 4)               response steps of the policy
    kp = min(0.08 sqrt(T), 2)
    g = 1 + min(n / 20, 3) * 20 / T          above the target, else 1: a weak penalty is worse
    h = clip(1 - p, 0, 1)                    below the target, else 1
    p                                        growth: m coef^2 over its mean in these n steps, - 1

A slow policy needs a slow integral: T makes it wait as long as the policy takes. A KL that grows
on its own shows nothing about the coefficient, so h holds it: on the way out from the
reference the KL is proportional to step^2, and p = 2. A KL that only follows the coefficient is
proportional to 1 / coef^2, and p = 0. m averages over max(30, T / 10) steps, and one measurement
counts as at most 3 max(m, target) away from m, which bounds the effect of an outlier.
`docs/explanation/kl-controller.md` has the analysis.

A non-finite measurement leaves the state unchanged. Every rule is clamped to [`low`, `high`], and
the state records which bound applies; there is no other integral that could wind up. The state
round-trips through JSON exactly.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from klinic.errors import ConfigError

BAND_WIDTH = 0.5  # the band is the target plus and minus this fraction of it
BAND_UP, BAND_DOWN = 1.5, 0.75
ZIEGLER_CLIP = 0.2  # Ziegler et al. (2019), section 2.2
SMOOTHING_STEPS, SMOOTHING_FRACTION = 30, 0.1  # of the KL, in log_pi; the fraction is of T
FIRST_SMOOTHING_STEPS = 5  # at the start: half the measurements so far, at least this many
MAX_INNOVATION = 3.0  # largest change of a KL that the average accepts, in max(average, target)
OFF_TARGET = 0.15  # error of log_pi that counts as off target: 60% noise, smoothed, has 0.1
MAX_ERROR = 3.0  # of the integral part
MIN_RESPONSE_STEPS = 20.0  # T of a fast policy: 1.8% per step at an error of 1
RESPONSE_FRACTION = 0.25  # T as a fraction of the time off target; less swings, more is slow
PROPORTIONAL, MAX_PROPORTIONAL = 0.08, 2.0  # kp per square root of T, and its maximum
EXTRA_GAIN = 3.0  # most that g adds to 1 at the smallest T

MIN_COEF = 1e-5  # almost no penalty, yet a multiplicative rule can still grow from it
MAX_LOG_COEF = 700.0  # exp of more overflows a double

RETIRED_FIELDS = frozenset({"num_above"})  # of checkpoints before log_pi measured the response

Rule = Literal["fixed", "band", "ziegler", "dual_ascent", "log_pi"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KLCoefRule:
    """Settings of an adaptation rule: which one, its target, bounds and gains."""

    rule: Rule = "fixed"
    target: float = 0.05
    """Mean KL(policy || reference) to hold, in nats per token."""
    low: float = MIN_COEF
    high: float = 100.0
    every: int = 20
    """Steps between two changes of `band`; with 1 it oscillates."""
    rate: float = 0.05
    """Largest relative change of `ziegler` per step, divided by its clip of 0.2."""
    step: float = 0.1
    """Step size of `dual_ascent`, in coefficient per nat per token."""

    def __post_init__(self) -> None:
        self._check_rule()
        self._check_ranges()

    def _check_rule(self) -> None:
        if self.rule not in RULES:
            rule_names = ", ".join(RULES)
            raise ConfigError(
                f"unknown KL coefficient rule {self.rule!r}. Use one of {rule_names}."
            )
        if self.rule in {"log_pi", "band", "ziegler"} and not self.low > 0:
            raise ConfigError(
                f"{self.rule} multiplies the coefficient: from 0 it could never grow. Its lower "
                "bound must be above 0 (1e-5 is the default)."
            )

    def _check_ranges(self) -> None:
        if not (self.target > 0 and math.isfinite(self.target)):
            raise ConfigError(
                f"the target is {self.target}: it is the mean KL to hold, in nats per token, and "
                "must be positive. 0.05 is the default."
            )
        if not 0 <= self.low <= self.high < math.inf:
            raise ConfigError(
                f"the bounds of the coefficient are {self.low} and {self.high}: the lower bound "
                "must not be negative or above the upper one, which must be finite."
            )
        if self.every < 1:
            raise ConfigError(f"the band rule acts every {self.every} steps: use 1 or more.")
        for name in ("rate", "step"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}: a negative value moves the KL away from its "
                    "target. Use 0 or more."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class KLCoefState:
    """The coefficient, and the state of its rule between steps."""

    coef: float
    num_updates: int = 0
    """Number of finite measurements."""
    smoothed_kl: float | None = None
    error: float | None = None
    num_off_target: int = 0
    """Measurements off target since the KL was last off on the other side, for `log_pi`; negative
    below the target."""
    mean_drift: float = 0.0
    """Mean of m coef^2 / target over these measurements."""
    response_steps: float = MIN_RESPONSE_STEPS
    """T of `log_pi`."""
    saturated: Literal["low", "high"] | None = None
    """The bound that the coefficient is clamped to, if any."""
    num_held: int = 0
    """Consecutive measurements at that bound."""

    def __post_init__(self) -> None:
        if not 0 <= self.coef < math.inf:
            raise ConfigError(
                f"the KL coefficient is {self.coef}: a negative one rewards distance from the "
                "reference. Use 0 or more (0.01 is usual)."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "KLCoefState":
        """Return the state from the values of `to_json`, bit for bit, without retired fields."""
        return cls(**{name: value for name, value in values.items() if name not in RETIRED_FIELDS})


def linear_warmup(coef: float, *, step: int, warmup_steps: int) -> float:
    """Return the coefficient at a step of a linear warm-up from 0.

    Formula: coef * min(1, step / warmup_steps).
    Symbols: step, counted from 0; warmup_steps, 0 for no warm-up.
    Assumes: the rule adapts `coef` itself; the warm-up only scales the value used in the loss.
    Source: the usual linear warm-up.

    >>> [linear_warmup(0.01, step=s, warmup_steps=4) for s in (0, 2, 4, 9)]
    [0.0, 0.005, 0.01, 0.01]
    """
    return coef if step >= warmup_steps else coef * (step / warmup_steps)


def update(rule: KLCoefRule, state: KLCoefState, kl: float) -> KLCoefState:
    """Return the state after one measured KL.

    Formula: the row of this module's table that `rule.rule` names, clamped to [low, high].
    Symbols: kl, the mean of k1 at `logp_old` over the step's trained tokens, in nats per token.
    Assumes: one call per step. A non-finite KL changes nothing.
    Source: this module's table.

    >>> rule = KLCoefRule(rule="band", target=0.05, every=1)
    >>> round(update(rule, KLCoefState(coef=0.01), 0.10).coef, 4)
    0.015
    >>> update(rule, KLCoefState(coef=0.01), math.nan).coef
    0.01
    """
    if not math.isfinite(kl):
        return state
    updated = RULES[rule.rule](rule, replace(state, num_updates=state.num_updates + 1), kl)
    clamped_coef = min(max(updated.coef, rule.low), rule.high)
    if rule.rule == "fixed" or rule.low < updated.coef < rule.high:
        return replace(updated, saturated=None, num_held=0)
    bound: Literal["low", "high"] = "low" if updated.coef <= rule.low else "high"
    num_held = state.num_held + 1 if state.saturated == bound else 1
    return replace(updated, coef=clamped_coef, saturated=bound, num_held=num_held)


def _update_fixed(_: KLCoefRule, state: KLCoefState, __: float) -> KLCoefState:
    return state


def _update_band(rule: KLCoefRule, state: KLCoefState, kl: float) -> KLCoefState:
    if state.num_updates % rule.every:
        return state
    if kl > (1 + BAND_WIDTH) * rule.target:
        return replace(state, coef=state.coef * BAND_UP)
    if kl < (1 - BAND_WIDTH) * rule.target:
        return replace(state, coef=state.coef * BAND_DOWN)
    return state


def _update_ziegler(rule: KLCoefRule, state: KLCoefState, kl: float) -> KLCoefState:
    error = min(max(kl / rule.target - 1, -ZIEGLER_CLIP), ZIEGLER_CLIP)
    return replace(state, coef=state.coef * (1 + error * rule.rate), error=error)


def _update_dual_ascent(rule: KLCoefRule, state: KLCoefState, kl: float) -> KLCoefState:
    error = kl - rule.target
    return replace(state, coef=max(state.coef + rule.step * error, 0.0), error=error)


def _update_log_pi(rule: KLCoefRule, state: KLCoefState, kl: float) -> KLCoefState:
    smoothed_kl = _smooth_kl(rule, state, kl)
    # the mean of k1 can be negative by chance: treat it as far below the target
    error = math.log(max(smoothed_kl / rule.target, math.exp(-1.0)))
    change = 0.0 if state.error is None else error - state.error
    log_coef = math.log(max(state.coef, rule.low))
    state = _follow_response(state, smoothed_kl / rule.target)
    response_steps = state.response_steps
    proportional = min(PROPORTIONAL * math.sqrt(response_steps), MAX_PROPORTIONAL)
    integral = min(max(smoothed_kl / rule.target - 1, -1.0), MAX_ERROR) / response_steps
    integral *= _integral_gain(state, smoothed_kl / rule.target)
    log_coef += proportional * (integral + change)
    coef = math.exp(min(log_coef, MAX_LOG_COEF))
    return replace(state, coef=coef, smoothed_kl=smoothed_kl, error=error)


def _smooth_kl(rule: KLCoefRule, state: KLCoefState, kl: float) -> float:
    """Return the running average, which one outlier moves by a bounded amount."""
    if state.smoothed_kl is None:
        return min(max(kl, 0.0), rule.target)
    steps = max(SMOOTHING_STEPS, SMOOTHING_FRACTION * state.response_steps)
    steps = min(steps, max(FIRST_SMOOTHING_STEPS, state.num_updates / 2))  # a KL that starts fast
    limit = MAX_INNOVATION * max(state.smoothed_kl, rule.target)
    return state.smoothed_kl + min(max(kl - state.smoothed_kl, -limit), limit) / steps


def _drift(ratio: float, coef: float) -> float:
    """Return m coef^2 / target: constant while the KL only follows the coefficient."""
    return min(max(ratio, 0.0) * coef * coef, sys.float_info.max)


def _follow_response(state: KLCoefState, ratio: float) -> KLCoefState:
    """Count the steps off target, and raise the response steps with their number."""
    if abs(ratio - 1) <= OFF_TARGET or state.saturated is not None:
        return state  # at a bound the KL does not answer: that is no measure of the policy
    side = 1 if ratio > 1 else -1
    count = 1 + (abs(state.num_off_target) if state.num_off_target * side > 0 else 0)
    mean = state.mean_drift if count > 1 else 0.0
    return replace(
        state,
        num_off_target=side * count,
        mean_drift=mean + (_drift(ratio, state.coef) - mean) / count,
        response_steps=max(state.response_steps, RESPONSE_FRACTION * count),
    )


def _integral_gain(state: KLCoefState, ratio: float) -> float:
    """Return g above the target, h below it, and 1 near it."""
    if abs(ratio - 1) <= OFF_TARGET:
        return 1.0
    if ratio > 1:
        extra = min(state.num_off_target / MIN_RESPONSE_STEPS, EXTRA_GAIN)
        return 1.0 + max(extra, 0.0) * MIN_RESPONSE_STEPS / state.response_steps
    if state.mean_drift == 0:
        return 1.0
    growth = _drift(ratio, state.coef) / state.mean_drift - 1
    return min(max(1.0 - growth, 0.0), 1.0)


RULES: dict[str, Callable[[KLCoefRule, KLCoefState, float], KLCoefState]] = {
    "fixed": _update_fixed,
    "band": _update_band,
    "ziegler": _update_ziegler,
    "dual_ascent": _update_dual_ascent,
    "log_pi": _update_log_pi,
}
