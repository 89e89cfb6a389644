"""Detects anomalies of a step: pure functions of its measurements and the history of the run.

    kind           condition                                                   checked
    not a number   non-finite weight, optimizer moment, reward,                before the update,
                   advantage, a logit, a log-prob, the loss or the gradient    weights also after
    gradient norm  above `grad_norm_limit` x the 90% quantile of recent ones   before the update
    batch reward   below the mean of recent ones by `reward_drop` and by       before the update
                   4 standard deviations
    update KL      KL(new || old) above 10 x `update_kl_limit`                 after the update
    KL             smoothed KL(policy || reference) above `kl_limit`           before the update
    sequence KL    every completion is above `kl.rollout_limit`                before the update
    reward         the smoothed reward is `reward_drop` below its best         before the update

The first four depend on one step and may be chance, so the step is retried. The others depend on
the history: a retry would find the same.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

WINDOW = 50  # recent gradient norms and rewards in the history
MIN_NORMS = 10  # gradient norms before the limit applies
MIN_REWARDS = 20  # rewards before their standard deviation is usable
QUANTILE = 0.9
DEVIATIONS = 4.0  # standard deviations: a false alarm in some thousand steps
SMOOTHING = 0.9  # of the reward: about ten steps
SMOOTHING_KL = 0.8  # of the KL: about five, so that one outlier is no anomaly
FIRST_BEST = 5  # steps before a smoothed reward can be the best: ignores one lucky batch
BLOW_UP = 10.0  # times `update_kl_limit`: not a large update, but a ruined policy

AnomalyKind = Literal[
    "not a number", "gradient norm", "batch reward", "update KL", "KL", "sequence KL", "reward"
]

SITES = (
    *("weights", "optimizer", "reward", "advantage"),
    *("logits", "logp", "logp_ref", "loss", "gradient"),
)
"""Where a non-finite value can occur, causes before effects."""
PERSISTENT_SITES = frozenset({"weights", "optimizer"})
"""Sites that persist across steps: damage there stays until a checkpoint is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyLimits:
    """Limits on a healthy step; None disables one. `klinic.recipe.sections` documents each."""

    kl: float | None = None
    update_kl: float | None = None
    grad_norm: float | None = None
    reward_drop: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """An anomaly of a step: its kind, and the measurement or site that shows it."""

    kind: AnomalyKind
    site: str | None = None
    """Site of the first non-finite value, if the anomaly is one."""
    measured: float | None = None
    limit: float | None = None
    damaged: bool = False
    """Whether weights or optimizer have changed, so that dropping the step is not enough."""

    @property
    def may_be_transient(self) -> bool:
        """Whether a retry of the step could succeed."""
        return self.kind not in {"KL", "sequence KL", "reward"}

    @property
    def blames_batch(self) -> bool:
        """Whether skipping the batch can help."""
        return self.may_be_transient

    @property
    def is_mild(self) -> bool:
        """Whether training may continue without the affected rows: non-finite rewards."""
        return self.site == "reward"

    def __str__(self) -> str:
        if self.kind == "not a number":
            return f"{self.site}: not a number"
        unit = {"KL": " nats per token", "update KL": " nats per token", "sequence KL": " nats"}
        return f"{self.kind} {self.measured:.4g}{unit.get(self.kind, '')}, limit {self.limit:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Running statistics that limits compare a step with; they round-trip through JSON exactly."""

    grad_norms: tuple[float, ...] = ()
    rewards: tuple[float, ...] = ()
    """Of recent steps."""
    reward: float | None = None
    """Smoothed."""
    kl: float | None = None
    """Smoothed, in nats per token."""
    num_kls: int = 0
    best_reward: float | None = None
    best_step: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "History":
        """Return the history from the result of `to_json`, bit for bit."""
        lists = {name: tuple(values[name]) for name in ("grad_norms", "rewards")}
        return cls(**{**values, **lists})


def with_reward(history: History, step: int, reward: float | None) -> History:
    """Return the history with a step's mean reward; a non-finite one is ignored."""
    if reward is None or not math.isfinite(reward):
        return history
    rewards = (*history.rewards, reward)[-WINDOW:]
    smoothed = _smooth_value(history.reward, reward, num=len(rewards), by=SMOOTHING)
    history = replace(history, reward=smoothed, rewards=rewards)
    if len(rewards) < FIRST_BEST:
        return history
    if history.best_reward is None or smoothed > history.best_reward:
        return replace(history, best_reward=smoothed, best_step=step)
    return history


def with_kl(history: History, kl: float | None) -> History:
    """Return the history with a step's mean k1; a non-finite one is ignored."""
    if kl is None or not math.isfinite(kl):
        return history
    num = history.num_kls + 1
    smoothed = _smooth_value(history.kl, kl, num=num, by=SMOOTHING_KL)
    return replace(history, kl=smoothed, num_kls=num)


def with_grad_norm(history: History, grad_norm: float) -> History:
    """Return the history with the norm of an applied gradient; 0 is ignored."""
    if grad_norm <= 0:
        return history
    return replace(history, grad_norms=(*history.grad_norms, grad_norm)[-WINDOW:])


def usual_grad_norm(history: History) -> float | None:
    """Return the 90% quantile of recent gradient norms; None if there are too few."""
    if len(history.grad_norms) < MIN_NORMS:
        return None
    return float(np.quantile(history.grad_norms, QUANTILE))


def non_finite(sites: Mapping[str, bool], *, damaged: bool = False) -> Anomaly | None:
    """Return the anomaly of the first site, causes first, with a non-finite value."""
    for site in SITES:
        if not sites.get(site, True):
            is_damaged = damaged or site in PERSISTENT_SITES
            return Anomaly(kind="not a number", site=site, damaged=is_damaged)
    return None


def check_grad_norm(
    limits: AnomalyLimits, history: History, grad_norm: float, *, damaged: bool = False
) -> Anomaly | None:
    """Return an anomaly if the gradient norm is far above recent ones."""
    usual = usual_grad_norm(history)
    if limits.grad_norm is None or usual is None:
        return None
    return _above_limit("gradient norm", grad_norm, limits.grad_norm * usual, damaged=damaged)


def check_batch_reward(
    limits: AnomalyLimits, history: History, reward: float | None
) -> Anomaly | None:
    """Return an anomaly if the batch reward is far below recent ones."""
    if limits.reward_drop is None or reward is None or len(history.rewards) < MIN_REWARDS:
        return None
    noise = DEVIATIONS * float(np.std(history.rewards, ddof=1))
    least = float(np.mean(history.rewards)) - max(limits.reward_drop, noise)
    if not reward < least:
        return None
    return Anomaly(kind="batch reward", measured=reward, limit=least)


def check_update_kl(limits: AnomalyLimits, update_kl: float | None) -> Anomaly | None:
    """Return an anomaly if the updates of a batch moved the policy far too much."""
    if limits.update_kl is None or update_kl is None:
        return None
    return _above_limit("update KL", update_kl, BLOW_UP * limits.update_kl, damaged=True)


def check_history(limits: AnomalyLimits, history: History) -> Anomaly | None:
    """Return an anomaly of the history: KL to the reference too high, or reward lost."""
    if limits.kl is not None and history.kl is not None and history.kl > limits.kl:
        return Anomaly(kind="KL", measured=history.kl, limit=limits.kl, damaged=True)
    if limits.reward_drop is None or history.best_reward is None or history.reward is None:
        return None
    least = history.best_reward - limits.reward_drop
    if history.reward >= least:
        return None
    return Anomaly(kind="reward", measured=history.reward, limit=least, damaged=True)


def is_healthy(limits: AnomalyLimits, history: History, *, best_reward: float | None) -> bool:
    """Whether a state is healthy enough to roll back to: within half of the history limits."""
    if limits.kl is not None and history.kl is not None and history.kl > limits.kl / 2:
        return False
    if limits.reward_drop is None or best_reward is None or history.reward is None:
        return True
    return history.reward >= best_reward - limits.reward_drop / 2


def _smooth_value(before: float | None, value: float, *, num: int, by: float) -> float:
    """Return the mean of the first few values, then their exponential moving average."""
    weight = max(1 / num, 1 - by)
    return value if before is None else (1 - weight) * before + weight * value


def _above_limit(
    kind: AnomalyKind, measured: float, limit: float, *, damaged: bool
) -> Anomaly | None:
    if measured <= limit:
        return None
    return Anomaly(kind=kind, measured=measured, limit=limit, damaged=damaged)
