"""Runs as rows of numbers: healthy ones that people mistake for sick ones, and sick ones."""

import numpy as np

from klinic.doctor.warning_signs import KLLimits, WarningState, watch_step

STEPS = 300


def run(kl, reward, *, equal=0.25, rate=1e-4, **more):
    """Return the metrics of every step; what is a list or an array goes by step."""
    kl = [None] * len(reward) if kl is None else kl
    rows = []
    for k, r in zip(kl, reward, strict=True):
        row = {"reward": float(r), "frac_reward_zero_std": equal, "learning_rate": rate, **more}
        rows.append(row if k is None else {**row, "kl_k1/mean": float(k)})
    return rows


def signs_of(rows, limits=None, state=None):
    """Return which signs were told at which step."""
    state, told = state or WarningState(), []
    for step, row in enumerate(rows, 1):
        watched = watch_step(state, row, limits or KLLimits())
        state = watched.signs
        told += [(step, sign.name) for sign in watched.new]
    return told


def noise(stream, size=0.03):
    return size * stream.normal(size=STEPS)


def rising(stream, rise):
    start = stream.uniform(0, 0.5)
    return np.linspace(start, start + rise, STEPS) + noise(stream)


def slow_drift(stream):
    """KL and reward rise together, slowly."""
    return run(np.linspace(0, stream.uniform(0.3, 2), STEPS), rising(stream, 0.3))


def fast_learner(stream):
    """The reward climbs within some dozen steps; KL is high from then on, and nothing is left."""
    steep = 1 - np.exp(-np.arange(STEPS) / stream.uniform(10, 20))
    reward = np.minimum(0.2 + 0.8 * steep + noise(stream), 1.0)
    return run(stream.uniform(0.3, 1) * steep, reward)


def one_spike(stream):
    """A format token makes KL jump for up to four steps, and it comes back."""
    kl = 0.05 + 0.01 * stream.random(STEPS)
    at = stream.integers(0, STEPS - 4)
    kl[at : at + stream.integers(1, 5)] = stream.uniform(1, 100)
    reward = 0.6 + noise(stream)
    return run(kl, reward)


def no_kl(stream):
    """Coefficient 0: no reference, no KL, whatever the reward does."""
    return run(None, stream.random(STEPS))


def kl_not_a_number(stream):
    """What is logged as NaN where it is not measured."""
    return run(np.full(STEPS, np.nan), stream.random(STEPS))


def from_nothing(stream):
    """Loss, KL, clip ratio and mean advantage are 0 at first; it learns all the same."""
    kl = 0.08 * np.linspace(0, 1, STEPS) ** 2
    more = {"loss": 0.0, "clip_ratio/region_mean": 0.0}
    return run(kl, rising(stream, 0.4), **more)


def noisy_sampler(stream):
    """Rounding in bf16 and importance ratios of raw log-probs; k1 averages below 0 by chance."""
    kl = 0.03 + 0.005 * stream.normal(size=STEPS)
    kl[::7] = -0.005
    more = {"sampling/sampling_logp_difference/mean": 0.03, "sampling/effective_sample_size": 0.9}
    return run(kl, 0.5 + noise(stream), **more)


def nothing_to_teach(stream):
    """Every group agrees: solved, or hopeless. No gradient, and nothing to warn of here."""
    return run(np.full(STEPS, 1e-3), np.full(STEPS, float(stream.integers(0, 2))), equal=1.0)


def slow_but_learning(stream):
    """A strong tie: KL stays below 0.01, and the reward rises."""
    return run(0.004 * stream.random(STEPS), rising(stream, 0.5))


HEALTHY = [
    *(slow_drift, fast_learner, one_spike, no_kl, kl_not_a_number, from_nothing),
    *(noisy_sampler, nothing_to_teach, slow_but_learning),
]
