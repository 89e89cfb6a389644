"""A policy that a coefficient can steer: what the controllers are tried on.

Sixteen contexts with 64 actions, a sparse reward, the exact gradient with noise, momentum (which is
lag), gradient clipping, and a KL that is measured with noise of 30%: enough to tell a controller
that settles from one that swings. The coefficient starts ten times too low.
"""

from collections.abc import Callable

import numpy as np

from klinic.maths.kl_coef import KLCoefRule, KLCoefState, update

CONTEXTS, ACTIONS = 16, 64
STEPS, LEARNING_RATE, MOMENTUM = 3000, 0.03, 0.9
START = 0.3


def closed_loop(
    rule: KLCoefRule,
    *,
    seed: int,
    measured: Callable[[int, float], float] = lambda _, kl: kl,
) -> tuple[np.ndarray, list[KLCoefState]]:
    """Return the true KL over the target at every step, and the states of the rule."""
    random = np.random.default_rng(seed)
    base = 2 * random.normal(size=(CONTEXTS, ACTIONS))
    reward = (random.random((CONTEXTS, ACTIONS)) < 0.1).astype(float)
    logp_ref, theta, speed = log_softmax(base), base.copy(), np.zeros_like(base)
    state, kls, states = KLCoefState(coef=START), [], []
    for step in range(STEPS):
        logp = log_softmax(theta)
        p, k1 = np.exp(logp), logp - logp_ref
        kl = (p * k1).sum(1, keepdims=True)
        rate = (p * reward).sum(1, keepdims=True)
        spread = np.sqrt(np.maximum(rate * (1 - rate), 1e-3))
        gradient = -p * (reward - rate) / spread + state.coef * p * (k1 - kl)
        gradient += 0.01 * random.normal(size=theta.shape)
        gradient *= min(1.0, 0.5 / np.linalg.norm(gradient))
        speed = MOMENTUM * speed + gradient
        theta = theta - LEARNING_RATE * speed
        noise = np.exp(0.3 * random.normal() - 0.045)
        state = update(rule, state, measured(step, float(kl.mean() * noise)))
        kls.append(float(kl.mean()))
        states.append(state)
    return np.array(kls) / rule.target, states


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
