"""Importance ratios, by exact sums."""

import math

import numpy as np
import pytest

from klinic.errors import ConfigError
from klinic.maths.ratio import (
    clip,
    effective_sample_size,
    sequence_ratio,
    token_ratio,
)

P = np.array([0.7, 0.2, 0.1])
Q = np.array([0.5, 0.3, 0.2])
VALUES = np.array([3.0, -1.0, 2.0])


def test_a_weighted_mean_over_the_sampler_is_a_mean_over_the_policy():
    weight = token_ratio(logp=np.log(P), logp_old=np.log(Q))
    assert np.sum(Q * weight * VALUES) == pytest.approx(np.sum(P * VALUES), rel=1e-12)


def test_the_sequence_ratio_is_a_geometric_mean_over_trained_tokens():
    logp, logp_old = np.log([0.4, 0.2, 0.9, 0.5]), np.log([0.1, 0.2, 0.1, 0.1])
    mask, offsets = np.array([True, True, False, True]), np.array([0, 3, 4])
    found = sequence_ratio(logp=logp, logp_old=logp_old, loss_mask=mask, row_offsets=offsets)
    np.testing.assert_allclose(found, [math.sqrt(4 * 1)] * 3 + [5.0], rtol=1e-12)


def test_the_effective_sample_size_is_the_share_of_useful_samples():
    assert effective_sample_size(log_weight=np.log([1.0, 1.0, 2.0])) == pytest.approx(16 / 18)
    assert effective_sample_size(log_weight=np.array([0.0, -900.0, -900.0])) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.2), (1.1, 0.2), (0.2, -0.1)])
def test_bounds_that_do_not_enclose_one_are_refused(low, high):
    with pytest.raises(ConfigError, match="must contain 1"):
        clip(np.ones(1), clip_low=low, clip_high=high)
