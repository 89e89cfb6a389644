"""Soft length penalty: grows from 0 to -1 before the hard length limit.

Source: Yu et al., "DAPO" (2025), section 3.4, equation 13.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float64, Int

from klinic.rewards.scores import Scores

PART = "overlong"


def overlong(lengths: Int[np.ndarray, "B"], *, limit: int, buffer: int) -> Float64[np.ndarray, "B"]:
    """Return the penalty of each completion by its number of tokens.

    >>> overlong(np.array([80, 90, 95, 100]), limit=100, buffer=10).tolist()
    [0.0, 0.0, -0.5, -1.0]
    """
    return -np.clip((lengths - (limit - buffer)) / buffer, 0.0, 1.0) + 0.0  # no -0.0


def with_overlong(scores: Scores, penalty: Float64[np.ndarray, "B"]) -> Scores:
    """Add the penalty to the scores; a completion without a reward keeps none."""
    return replace(scores, total=scores.total + penalty, parts={**scores.parts, PART: penalty})
