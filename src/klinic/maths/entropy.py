"""Entropy of a policy."""

from typing import Any

from jaxtyping import Float

from klinic.maths.arrays import array_namespace

MIN_LOGP = -1e4  # exp of it is 0 in every precision


def entropy(logp: Float[Any, "*shape V"]) -> Float[Any, "*shape"]:
    """Return the entropy of each row of log-probs, in nats.

    Formula: -sum_x p(x) log p(x).
    Symbols: logp, normalised log-probs of every outcome; -inf where p(x) = 0.
    Assumes: rows are normalised. An outcome of probability 0 adds nothing.
    Source: C. Shannon, "A Mathematical Theory of Communication" (1948).

    >>> import numpy as np
    >>> entropy(np.log([[0.5, 0.25, 0.25]])).round(4)
    array([1.0397])
    """
    xp = array_namespace(logp)
    # where p is 0 the log-prob must be finite: 0 * -inf is NaN
    return -xp.linalg.vecdot(xp.exp(logp), xp.clip(logp, MIN_LOGP, None))
