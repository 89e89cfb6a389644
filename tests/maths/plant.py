"""A policy that a coefficient can steer: what the controllers are tried on.

Sixteen contexts with 64 actions, a sparse reward, the exact gradient with noise, momentum (which is
lag), gradient clipping, and a KL that is measured with noise of 30%: enough to tell a controller
that settles from one that swings. The coefficient starts ten times too low. The rate of learning
sets how slowly the policy answers: at 0.0003 its KL needs 2,000 steps to the target, at 0.1 14.
"""

from collections.abc import Callable

import numpy as np

from klinic.maths.kl_coef import KLCoefRule, KLCoefState, update

CONTEXTS, ACTIONS = 16, 64
STEPS, LEARNING_RATE, MOMENTUM = 3000, 0.03, 0.9
START = 0.3
Measured = Callable[[int, float], float]


def closed_loop(
    rule: KLCoefRule, *, seed: int, measured: Measured = lambda _, kl: kl
) -> tuple[np.ndarray, list[KLCoefState]]:
    """Return the true KL over the target at every step, and the states of the rule."""
    ratios, states = closed_loops(rule, rates=[LEARNING_RATE], seeds=[seed], measured=measured)
    return ratios[:, 0, 0], [row[0] for row in states]


def closed_loops(
    rule: KLCoefRule,
    *,
    rates: list[float],
    seeds: list[int],
    steps: int = STEPS,
    start: float = START,
    measured: Measured = lambda _, kl: kl,
) -> tuple[np.ndarray, list[list[KLCoefState]]]:
    """Return the ratios by step, rate and seed, and the states by step; all rates share noise."""
    streams = [np.random.default_rng(seed) for seed in seeds]
    shape = (CONTEXTS, ACTIONS)
    base = np.stack([2 * stream.normal(size=shape) for stream in streams])
    reward = np.stack([(stream.random(shape) < 0.1).astype(float) for stream in streams])
    rate_of_learning = np.array(rates)[:, None, None, None]
    logp_ref, theta = log_softmax(base), np.tile(base, (len(rates), 1, 1, 1))
    speed = np.zeros_like(theta)
    now = [KLCoefState(coef=start)] * (len(rates) * len(seeds))
    kls, states = [], []
    for step in range(steps):
        coef = np.array([state.coef for state in now]).reshape(len(rates), len(seeds), 1, 1)
        gradient, kl = gradient_and_kl(theta, logp_ref, reward, coef)
        noise = []
        for seed, stream in enumerate(streams):
            gradient[:, seed] += 0.01 * stream.normal(size=shape)
            noise.append(np.exp(0.3 * stream.normal() - 0.045))
        norm = np.linalg.norm(gradient, axis=(2, 3), keepdims=True, ord="fro")
        speed = MOMENTUM * speed + gradient * np.minimum(1.0, 0.5 / norm)
        theta = theta - rate_of_learning * speed
        seen = (kl * noise).ravel().tolist()
        now = [
            update(rule, state, measured(step, value))
            for state, value in zip(now, seen, strict=True)
        ]
        kls.append(kl)
        states.append(now)
    return np.array(kls) / rule.target, states


def gradient_and_kl(
    theta: np.ndarray, logp_ref: np.ndarray, reward: np.ndarray, coef: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the exact gradient of the loss, and the mean KL of every policy."""
    logp = log_softmax(theta)
    p, k1 = np.exp(logp), logp - logp_ref
    kl = (p * k1).sum(-1, keepdims=True)
    success = (p * reward).sum(-1, keepdims=True)
    spread = np.sqrt(np.maximum(success * (1 - success), 1e-3))
    gradient = -p * (reward - success) / spread + coef * p * (k1 - kl)
    return gradient, kl.mean(axis=(2, 3))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
