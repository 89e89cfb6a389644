"""Rules that adapt the coefficient of the KL term, as pure functions of a small state.

    name         rule                                                         source
    fixed        coef stays                                                   -
    (warm-up)    coef * min(1, step / warmup_steps), on top of any rule       -
    band         x 1.5 above 1.5 target, x 0.75 below 0.5 target              PPO's rule, softened
    ziegler      coef * (1 + clip(kl / target - 1, +-0.2) * rate)             Ziegler et al. (2019)
    dual_ascent  max(0, coef + step * (kl - target))                          Lagrange multiplier
    log_pi       ln coef + ki g e + kp (e - e_prev), with                     PI control, log space
                 e = clip(ln(m / target), +-1), m the smoothed KL, g below

The measured KL is the mean of k1 at `logp_old`, in nats per token. The KL integrates the policy's
updates, so a rule that multiplies at every step is an integrator on an integrator: it oscillates.
Change little per step, or add the proportional part of `log_pi`.

The effect of a coefficient depends on its size: far below its equilibrium it does almost nothing,
near it a doubling halves the KL. Gains that are stable near the equilibrium are slow on the way.
So `log_pi` has g = 1, rising to 3 the longer the KL stays above the target. The gain rises only
above: too strong a penalty costs time, too weak a one costs the policy. It grows with time and not
with the error, which prevents oscillation.

A non-finite measurement leaves the state unchanged. Every rule is clamped to [`low`, `high`], and
the state records which bound applies. The state round-trips through JSON exactly.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from klinic.errors import ConfigError

BAND_WIDTH = 0.5  # the band is the target plus and minus this fraction of it
BAND_UP, BAND_DOWN = 1.5, 0.75
ZIEGLER_CLIP = 0.2  # Ziegler et al. (2019), section 2.2
SMOOTHING = 0.9  # of the KL, in log_pi: about ten steps, shorter than the policy's own response
ABOVE_TARGET_ERROR = (
    0.15  # error of log_pi beyond which the KL counts as above: 50% noise, smoothed
)
GAIN_STEPS, MAX_GAIN = 5, 3.0  # steps for g to grow by 1, and its maximum: 9% per step
ABOVE_COUNT_DECAY = (
    0.8  # decay of `num_above` per step that is not above: one dip does not reset it
)

MIN_COEF = 1e-5  # almost no penalty, yet a multiplicative rule can still grow from it
MAX_LOG_COEF = 700.0  # exp of more overflows a double

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
    integral: float = 0.03
    """Integral gain of `log_pi` at g = 1: at most 3% per step."""
    proportional: float = 0.4

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
        for name in ("rate", "step", "integral", "proportional"):
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
    num_above: float = 0.0
    """Decayed count of measurements above the target, for `log_pi`; other steps take off 20%."""
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
        """Return the state from the values of `to_json`, bit for bit."""
        return cls(**values)


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
    previous_kl = kl if state.smoothed_kl is None else state.smoothed_kl
    smoothed_kl = SMOOTHING * previous_kl + (1 - SMOOTHING) * kl
    # the mean of k1 can be negative by chance: treat it as far below the target
    error = -1.0 if smoothed_kl <= 0 else min(max(math.log(smoothed_kl / rule.target), -1.0), 1.0)
    change = 0.0 if state.error is None else error - state.error
    num_above = (
        state.num_above + 1 if error > ABOVE_TARGET_ERROR else ABOVE_COUNT_DECAY * state.num_above
    )
    gain = min(1 + num_above / GAIN_STEPS, MAX_GAIN) if error > 0 else 1.0
    log_coef = math.log(max(state.coef, rule.low))
    log_coef += rule.integral * gain * error + rule.proportional * change
    coef = math.exp(min(log_coef, MAX_LOG_COEF))
    return replace(state, coef=coef, smoothed_kl=smoothed_kl, error=error, num_above=num_above)


RULES: dict[str, Callable[[KLCoefRule, KLCoefState, float], KLCoefState]] = {
    "fixed": _update_fixed,
    "band": _update_band,
    "ziegler": _update_ziegler,
    "dual_ascent": _update_dual_ascent,
    "log_pi": _update_log_pi,
}
