"""Rules that move the coefficient of the KL term, as pure functions of a small state.

    name         rule                                                         source
    fixed        coef stays                                                   -
    (warm-up)    coef * min(1, step / warmup_steps), on top of any rule       -
    band         x 1.5 above 1.5 target, x 0.75 below 0.5 target              PPO's rule, softened
    ziegler      coef * (1 + clip(kl / target - 1, +-0.2) * rate)             Ziegler et al. (2019)
    dual_ascent  max(0, coef + step * (kl - target))                          Lagrange multiplier
    log_pi       ln coef + ki g e + kp (e - e_prev), with                     PI control, log space
                 e = clip(ln(m / target), +-1), m the smoothed KL, g below

The measured KL is the mean of k1 at `logp_old`, in nats per token. It integrates what the policy
does, so a rule that multiplies at every step is an integrator on an integrator: it swings. Change
little per step, or add the proportional part that `log_pi` has.

How much a coefficient does depends on where it is: far below its place it does next to nothing,
there it halves the KL when it doubles. Gains that are quiet there are slow on the way. So `log_pi`
has g = 1, and more, up to 3, the longer the KL stays above the target: evidently the coefficient
does little. Only above: a tie that is too strong costs time, one that is too weak the policy. That
the gain grows with time and not with the error is what keeps it from swinging.

One NaN changes nothing: a measurement that is not finite leaves the state as it was. Every rule is
held between `low` and `high`, and says when it is held there. The state is plain numbers and
survives JSON exactly.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from klinic.errors import ConfigError

BAND = 0.5  # the band is the target plus and minus this share of it
BAND_UP, BAND_DOWN = 1.5, 0.75
ZIEGLER_CLIP = 0.2  # Ziegler et al. (2019), section 2.2
SMOOTHING = 0.9  # of the KL, in log_pi: about ten steps, shorter than the policy's own response
STAYS_ABOVE = 0.15  # as an error of log_pi: the noise of a KL of 50% a step, smoothed
GAIN_STEPS, MOST_GAIN = 5, 3.0  # g grows by 1 in so many steps; at most 9% a step
FORGETTING = 0.8  # of the steps above, with each that is not: a dip is not the end of a stay

LOWEST = 1e-5  # no tie to speak of, and a rule that multiplies can still come back from it
LARGEST_LOG = 700.0  # exp of more overflows a double

Rule = Literal["fixed", "band", "ziegler", "dual_ascent", "log_pi"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KLCoefRule:
    """How the coefficient moves, and within which bounds."""

    rule: Rule = "fixed"
    target: float = 0.05
    """Mean KL(policy || reference) to hold, in nats per token."""
    low: float = LOWEST
    high: float = 100.0
    every: int = 20
    """Steps between two changes of `band`; at every step it oscillates."""
    rate: float = 0.05
    """Largest share by which `ziegler` moves in a step, divided by its clip of 0.2."""
    step: float = 0.1
    """Step size of `dual_ascent`, in coefficient per nat per token."""
    integral: float = 0.03
    """Of `log_pi`, for an error that is small or new: 3% a step at most."""
    proportional: float = 0.4

    def __post_init__(self) -> None:
        self._check_rule()
        self._check_numbers()

    def _check_rule(self) -> None:
        if self.rule not in RULES:
            known = ", ".join(RULES)
            raise ConfigError(f"the rule {self.rule!r} is not known. Use one of {known}.")
        if self.rule in {"log_pi", "band", "ziegler"} and not self.low > 0:
            raise ConfigError(
                f"{self.rule} multiplies the coefficient: at 0 it would stay there for ever. Its "
                "lower bound must be above 0 (1e-5 is the default)."
            )

    def _check_numbers(self) -> None:
        if not (self.target > 0 and math.isfinite(self.target)):
            raise ConfigError(
                f"the target is {self.target}: it is the mean KL to hold, in nats per token, and "
                "must be positive. 0.05 is the default."
            )
        if not 0 <= self.low <= self.high < math.inf:
            raise ConfigError(
                f"the coefficient is to stay between {self.low} and {self.high}: the lower bound "
                "must not be negative nor above the upper one, which must be finite."
            )
        if self.every < 1:
            raise ConfigError(f"the band rule acts every {self.every} steps: use 1 or more.")
        for name in ("rate", "step", "integral", "proportional"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}: a negative one moves the coefficient away "
                    "from its target. Use 0 or more."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class KLCoefState:
    """What a rule remembers from step to step."""

    coef: float
    num_updates: int = 0
    """Finite measurements seen."""
    smoothed_kl: float | None = None
    error: float | None = None
    num_above: float = 0.0
    """Measurements for which `log_pi` saw the KL stay above; a fifth is lost when it is not."""
    saturated: Literal["low", "high"] | None = None
    """At which bound the coefficient is held, if at one."""
    num_held: int = 0
    """Measurements in a row that left it at that bound."""

    def __post_init__(self) -> None:
        if not 0 <= self.coef < math.inf:
            raise ConfigError(
                f"the KL coefficient is {self.coef}: a negative one rewards leaving the reference. "
                "Use 0 or more (0.01 is usual)."
            )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "KLCoefState":
        """Return the state that `to_json` wrote, bit for bit."""
        return cls(**values)


def linear_warmup(coef: float, *, step: int, warmup_steps: int) -> float:
    """Return the coefficient to use at a step while it rises from 0.

    Formula: coef * min(1, step / warmup_steps).
    Symbols: step, counted from 0; warmup_steps, 0 for no warm-up.
    Assumes: the rule below moves `coef` itself; the warm-up only scales what is used.
    Source: the usual linear warm-up.

    >>> [linear_warmup(0.01, step=s, warmup_steps=4) for s in (0, 2, 4, 9)]
    [0.0, 0.005, 0.01, 0.01]
    """
    return coef if step >= warmup_steps else coef * (step / warmup_steps)


def update(rule: KLCoefRule, state: KLCoefState, kl: float) -> KLCoefState:
    """Return the state after one measured KL.

    Formula: the row of this module's table that `rule.rule` names, held within [low, high].
    Symbols: kl, the mean of k1 at `logp_old` over the step's trained tokens, in nats per token.
    Assumes: one call a step. A KL that is not finite changes nothing.
    Source: this module's table.

    >>> rule = KLCoefRule(rule="band", target=0.05, every=1)
    >>> round(update(rule, KLCoefState(coef=0.01), 0.10).coef, 4)
    0.015
    >>> update(rule, KLCoefState(coef=0.01), math.nan).coef
    0.01
    """
    if not math.isfinite(kl):
        return state
    moved = RULES[rule.rule](rule, replace(state, num_updates=state.num_updates + 1), kl)
    held = min(max(moved.coef, rule.low), rule.high)
    if rule.rule == "fixed" or rule.low < moved.coef < rule.high:
        return replace(moved, saturated=None, num_held=0)
    bound: Literal["low", "high"] = "low" if moved.coef <= rule.low else "high"
    num_held = state.num_held + 1 if state.saturated == bound else 1
    return replace(moved, coef=held, saturated=bound, num_held=num_held)


def _fixed(_: KLCoefRule, state: KLCoefState, __: float) -> KLCoefState:
    return state


def _band(rule: KLCoefRule, state: KLCoefState, kl: float) -> KLCoefState:
    if state.num_updates % rule.every:
        return state
    if kl > (1 + BAND) * rule.target:
        return replace(state, coef=state.coef * BAND_UP)
    if kl < (1 - BAND) * rule.target:
        return replace(state, coef=state.coef * BAND_DOWN)
    return state


def _ziegler(rule: KLCoefRule, state: KLCoefState, kl: float) -> KLCoefState:
    error = min(max(kl / rule.target - 1, -ZIEGLER_CLIP), ZIEGLER_CLIP)
    return replace(state, coef=state.coef * (1 + error * rule.rate), error=error)


def _dual_ascent(rule: KLCoefRule, state: KLCoefState, kl: float) -> KLCoefState:
    error = kl - rule.target
    return replace(state, coef=max(state.coef + rule.step * error, 0.0), error=error)


def _log_pi(rule: KLCoefRule, state: KLCoefState, kl: float) -> KLCoefState:
    before = kl if state.smoothed_kl is None else state.smoothed_kl
    smoothed = SMOOTHING * before + (1 - SMOOTHING) * kl
    # k1 can average below zero by chance; that is "far too low", not a logarithm to take
    error = -1.0 if smoothed <= 0 else min(max(math.log(smoothed / rule.target), -1.0), 1.0)
    change = 0.0 if state.error is None else error - state.error
    num_above = state.num_above + 1 if error > STAYS_ABOVE else FORGETTING * state.num_above
    gain = min(1 + num_above / GAIN_STEPS, MOST_GAIN) if error > 0 else 1.0
    log_coef = math.log(max(state.coef, rule.low))
    log_coef += rule.integral * gain * error + rule.proportional * change
    coef = math.exp(min(log_coef, LARGEST_LOG))
    return replace(state, coef=coef, smoothed_kl=smoothed, error=error, num_above=num_above)


RULES: dict[str, Callable[[KLCoefRule, KLCoefState, float], KLCoefState]] = {
    "fixed": _fixed,
    "band": _band,
    "ziegler": _ziegler,
    "dual_ascent": _dual_ascent,
    "log_pi": _log_pi,
}
