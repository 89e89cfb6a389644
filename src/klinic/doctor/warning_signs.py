"""Warning signs from the metrics of a run, each with a figure, a limit and a unit.

    sign             figure                                    limit                    and
    drift too fast   median KL of the last 10 measured steps   > 0.2 (or 4 x target)    no rise
    not learning     the same                                  < 0.01 (or target / 4)   no rise

KL is the mean of k1 at `logp_old`, in nats per token. With a controller the laxer limit applies. A
high KL alone is no sign: a policy that learns fast is far from its reference, and stays there after
learning. Nor is one spike, which a median of ten ignores. So drift is compared with the reward: it
is a sign if after 100 steps above the limit the reward is no higher than it was below the limit.
Earlier, only a fall of the reward by far more than chance is a sign.

A sign is reported once, until it clears: the KL is back within the limit, or, for "not learning",
the reward rises. An unmeasured metric raises no sign. The state round-trips through JSON exactly.

Source of 0.2 and 0.01: GRPO tutorials, which give them without a unit; here the unit is nats per
token, and neither is used alone.

Lost skills are a sign of their own: retention fell by more than chance.

    sign                 figure                             limit    and
    retention dropping   eval/retention below its start     > 0.05   > 2 standard errors

Both evaluations use the same prompts, so the error of independent samples is conservative.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from klinic.recipe.sections import KLSection

WINDOW = 10  # steps: their median ignores four outliers
MEMORY = 100  # rewards: a rise of 0.05 over them exceeds a noise of 0.05 by three errors
PATIENCE = 100  # steps above the limit until the reward must have risen
FAR, NEAR = 0.2, 0.01  # nats per token
OFF_TARGET = 4.0  # times the target: a settled controller stays well within
FALL = 4.0  # standard errors between ten steps and ten: chance alone, once in 30,000
FALL_MEMORY = 50  # steps that the reward's noise is estimated from
FALL_SHARE = 0.1  # and of the reward: near its maximum, noise is not Gaussian
MIN_LEARNABLE = 100  # steps with a learning signal: at 50, slow healthy runs would alarm
RISE = 1.0  # standard errors: above it, the reward may be rising

DRIFT, STILL = "drift too fast", "not learning"


@dataclass(frozen=True, slots=True, kw_only=True)
class KLLimits:
    """Range of the KL of a run that learns, in nats per token."""

    far: float = FAR
    near: float = NEAR


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningSign:
    """One reported warning sign."""

    name: str
    sentence: str
    facts: dict[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningState:
    """State carried from step to step."""

    kls: tuple[float, ...] = ()
    """KL of the last measured steps."""
    rewards: tuple[float, ...] = ()
    within: float | None = None
    """Mean reward when the KL was last within its limit."""
    num_beyond: int = 0
    """Steps since then, above the limit."""
    num_learnable: int = 0
    """Steps in which a group had different rewards and the policy could move."""
    standing: tuple[str, ...] = ()
    """Reported signs that have not cleared."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "WarningState":
        """Return the state from the result of `to_json`, bit for bit."""
        lists = {name: tuple(values[name]) for name in ("kls", "rewards", "standing")}
        return cls(**{**values, **lists})


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningUpdate:
    """The state after a step or evaluation, and the new signs."""

    signs: WarningState
    new: list[WarningSign]


def kl_limits(kl: KLSection | None) -> KLLimits:
    """Return the limits of a run; a controller's target is always within them.

    >>> kl_limits(KLSection(controller="log_pi", target=0.1))
    KLLimits(far=0.4, near=0.01)
    """
    if kl is None or kl.controller == "fixed":
        return KLLimits()
    return KLLimits(far=max(FAR, OFF_TARGET * kl.target), near=min(NEAR, kl.target / OFF_TARGET))


def watch_step(
    signs: WarningState, metrics: Mapping[str, float], limits: KLLimits
) -> WarningUpdate:
    """Return the state after a step's metrics, with the new signs."""
    signs = _add_metrics(signs, metrics, limits)
    if len(signs.kls) < WINDOW:
        return WarningUpdate(signs=signs, new=[])
    kl = float(np.median(signs.kls))
    drift = update_sign(
        signs, DRIFT, _is_drifting(signs, kl, limits), lambda: _drift_sign(kl, limits)
    )
    still = _is_not_learning(signs, kl, limits) if _is_learnable(metrics) else None
    both = update_sign(drift.signs, STILL, still, lambda: _still_sign(kl, limits))
    return WarningUpdate(signs=both.signs, new=drift.new + both.new)


def _add_metrics(
    signs: WarningState, metrics: Mapping[str, float], limits: KLLimits
) -> WarningState:
    kl, reward = metrics.get("kl_k1/mean", math.nan), metrics.get("reward", math.nan)
    kls, rewards = signs.kls, signs.rewards
    if math.isfinite(kl):
        kls = (*kls, kl)[-WINDOW:]
    if math.isfinite(reward):
        rewards = (*rewards, reward)[-MEMORY:]
    beyond = len(kls) == WINDOW and float(np.median(kls)) > limits.far
    return replace(
        signs,
        kls=kls,
        rewards=rewards,
        within=signs.within if beyond or not rewards else _mean(rewards),
        num_beyond=signs.num_beyond + 1 if beyond else 0,
        num_learnable=signs.num_learnable + _is_learnable(metrics),
    )


def _is_learnable(metrics: Mapping[str, float]) -> bool:
    """Whether a step had differing rewards, a learning rate and the full reward scale."""
    return (
        metrics.get("frac_reward_zero_std", 1.0) < 1
        and metrics.get("learning_rate", 0.0) > 0
        and metrics.get("reward_scale", 1.0) == 1
    )


def _is_drifting(signs: WarningState, kl: float, limits: KLLimits) -> bool | None:
    """Whether the policy drifts; None keeps the previous state of the sign."""
    if kl <= limits.far:
        return False
    return True if _reward_falls(signs.rewards) or _reward_did_not_rise(signs) else None


def _reward_falls(rewards: Sequence[float]) -> bool:
    """Whether the last ten rewards are below the previous ten by far more than chance."""
    last, before = rewards[-WINDOW:], rewards[-2 * WINDOW : -WINDOW]
    if len(before) < WINDOW:
        return False
    fall = _mean(before) - _mean(last)
    error = math.sqrt(2 * _variance(rewards[-FALL_MEMORY:]) / WINDOW)
    return fall > FALL * error and fall > FALL_SHARE * abs(_mean(before))


def _reward_did_not_rise(signs: WarningState) -> bool:
    """Whether the reward, long above the KL limit, is no higher than it was below."""
    if signs.num_beyond < PATIENCE or signs.within is None:
        return False
    error = math.sqrt(2 * _variance(signs.rewards) / len(signs.rewards))
    return _mean(signs.rewards) <= signs.within + RISE * error


def _is_not_learning(signs: WarningState, kl: float, limits: KLLimits) -> bool:
    if kl >= limits.near or signs.num_learnable < MIN_LEARNABLE:
        return False
    trend = slope(signs.rewards)
    return trend.value <= RISE * trend.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """Slope of a line through equally spaced values, with its standard error."""

    value: float
    error: float


def slope(values: Sequence[float]) -> Slope:
    """Return the least-squares slope per step.

    Formula: sum x y / sum x^2 with x centred; error^2 = sum r^2 / ((n - 2) sum x^2).
    Symbols: y, the values; r, the residuals; n, their number, 3 or more.
    Assumes: independent noise per step.
    Source: ordinary least squares.

    >>> slope([1.0, 3.0, 5.0])
    Slope(value=2.0, error=0.0)
    """
    y = np.asarray(values, dtype=np.float64)
    x = np.arange(y.size) - (y.size - 1) / 2
    spread = float((x * x).sum())
    value = float((x * y).sum()) / spread
    left = y - y.mean() - value * x
    return Slope(value=value, error=math.sqrt(float((left * left).sum()) / (y.size - 2) / spread))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    return float(np.var(values, ddof=1))


def update_sign(
    signs: WarningState, name: str, is_present: bool | None, sign: Callable[[], WarningSign]
) -> WarningUpdate:
    """Return the sign if it is present and was not before; clear it when it is absent."""
    standing = name in signs.standing
    if is_present is None or is_present == standing:
        return WarningUpdate(signs=signs, new=[])
    if is_present:
        return WarningUpdate(signs=replace(signs, standing=(*signs.standing, name)), new=[sign()])
    rest = tuple(other for other in signs.standing if other != name)
    return WarningUpdate(signs=replace(signs, standing=rest), new=[])


def _drift_sign(kl: float, limits: KLLimits) -> WarningSign:
    return WarningSign(
        name=DRIFT,
        sentence=(
            f"The KL is {kl:.3g} nats per token (median of {WINDOW} steps, limit "
            f"{limits.far:.3g}), and the reward does not rise with it: the policy drifts from "
            "its reference without gain. Raise kl.coef, or lower learner.learning_rate."
        ),
        facts={"figure": kl, "limit": limits.far, "unit": "nats per token"},
    )


def _still_sign(kl: float, limits: KLLimits) -> WarningSign:
    return WarningSign(
        name=STILL,
        sentence=(
            f"The KL is {kl:.3g} nats per token (median of {WINDOW} steps, limit "
            f"{limits.near:.3g}), and the reward does not rise, although rewards within groups "
            "differ: the policy hardly moves. Raise learner.learning_rate, or lower "
            "kl.coef."
        ),
        facts={"figure": kl, "limit": limits.near, "unit": "nats per token"},
    )


MAX_LOSS = 0.05  # of the score before the first step
MIN_ERRORS = 2.0  # standard errors
FORGETTING = "retention dropping"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSetup:
    """The setup of every evaluation."""

    num: int
    """Number of prompts per skill, or of retention rows."""
    trained: str | None = None
    """The trained skill, which does not count for retention."""


def watch_retention(
    signs: WarningState, now: Mapping[str, float], before: Mapping[str, float], setup: EvalSetup
) -> WarningUpdate:
    """Return the state after an evaluation, with the sign if it is new.

    `before` is the evaluation before the first step. Needs accuracies or mean rewards between 0 and
    1: for other values the mean does not determine the error, and no sign is raised.
    """
    retention = now.get("eval/retention")
    pairs = [(before[name], now[name]) for name in _retained_metrics(now, before, setup.trained)]
    if retention is None or not pairs or not all(0 <= p <= 1 for pair in pairs for p in pair):
        return WarningUpdate(signs=signs, new=[])
    error = _retention_error(pairs, setup.num)
    lost, limit = 1 - retention, max(MAX_LOSS, MIN_ERRORS * error)
    return update_sign(
        signs, FORGETTING, lost > limit, lambda: _forgetting_sign(lost, limit, error)
    )


def _retention_error(pairs: Sequence[tuple[float, float]], num: int) -> float:
    """Return the standard error of the mean of now / before.

    Formula: sqrt(sum (v(now) + v(before)) / before^2) / k, v(p) = q (1 - q) / (n + 2) with
    q = (n p + 1) / (n + 2), since a fraction of 0 or 1 out of few prompts is uncertain.
    Source: Agresti and Caffo, "Simple and effective confidence intervals for proportions" (2000).
    """

    def adjusted_variance(share: float) -> float:
        adjusted = (num * share + 1) / (num + 2)
        return adjusted * (1 - adjusted) / (num + 2)

    total = sum(
        (adjusted_variance(now) + adjusted_variance(before)) / before**2 for before, now in pairs
    )
    return math.sqrt(total) / len(pairs)


def _retained_metrics(
    now: Mapping[str, float], before: Mapping[str, float], trained: str | None
) -> list[str]:
    """Return the retained metrics: of untrained skills, nonzero before the first step."""
    names = [name for name in before if name.startswith("eval/accuracy/")]
    names = [name for name in names if name != f"eval/accuracy/{trained}"]
    names = names or ["eval/retention_reward"]
    return [name for name in names if before.get(name, 0.0) > 0 and name in now]


def _forgetting_sign(lost: float, limit: float, error: float) -> WarningSign:
    return WarningSign(
        name=FORGETTING,
        sentence=(
            f"Retention fell by {lost:.3f} since the first step (limit {limit:.3f}, standard error "
            f"{error:.3f}): the policy forgets skills that are not trained. Raise kl.coef, or "
            "return to an earlier checkpoint."
        ),
        facts={"figure": lost, "limit": limit, "unit": "share of the start", "error": error},
    )
