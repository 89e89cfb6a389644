"""Importance weights in four modes, by hand and by exact sums over a vocabulary."""

import itertools
import math
from typing import get_args

import numpy as np
import pytest

from klinic.errors import ConfigError
from klinic.maths.importance import ImportanceSampling, Mode, above_cap, importance_weight

P = np.array([0.7, 0.2, 0.1])
Q = np.array([0.5, 0.3, 0.2])
VALUES = np.array([3.0, -1.0, 2.0])


def weight(mode, cap, logp, logp_sampler, *, offsets=None, mask=None):
    return importance_weight(
        ImportanceSampling(mode=mode, cap=cap),
        logp=logp,
        logp_sampler=logp_sampler,
        loss_mask=np.ones(len(logp), dtype=bool) if mask is None else mask,
        row_offsets=np.array([0, len(logp)]) if offsets is None else offsets,
    )


@pytest.mark.parametrize(
    ("mode", "by_hand"),
    [
        ("token_truncate", [2.0, 0.5, 3.0, 1.0]),
        ("token_mask", [2.0, 0.5, 0.0, 1.0]),
        ("sequence_truncate", [1.0, 1.0, 3.0, 3.0]),
        ("sequence_mask", [1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_each_mode_by_hand(mode, by_hand):
    ratio = np.log([2.0, 0.5, 5.0, 1.0])
    found = weight(mode, 3.0, ratio, np.zeros(4), offsets=np.array([0, 2, 4]))
    np.testing.assert_allclose(found, by_hand, rtol=1e-12)
    saturated = above_cap(
        ImportanceSampling(mode=mode, cap=3.0),
        logp=ratio,
        logp_sampler=np.zeros(4),
        loss_mask=np.array([True, True, True, False]),
        row_offsets=np.array([0, 2, 4]),
    )
    assert saturated.tolist() == [False, False, True, False]


@pytest.mark.parametrize("mode", get_args(Mode))
def test_only_trained_tokens_count_for_a_row(mode):
    logp, mask = np.log([0.4, 0.9]), np.array([True, False])
    found = weight(mode, 9.0, logp, np.log([0.2, 0.1]), mask=mask)
    assert found[0] == pytest.approx(2.0)


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_a_mean_over_the_sampler_is_one_over_the_policy(mode):
    """Two tokens: sequence weights make any function of both exact, not only of the last."""
    pairs = [list(pair) for pair in itertools.product(range(3), range(3))]
    value = [VALUES[a] ** 2 * VALUES[b] for a, b in pairs]
    weights = [weight(mode, math.inf, np.log(P[pair]), np.log(Q[pair]))[0] for pair in pairs]
    found = sum(Q[pair].prod() * w * x for pair, w, x in zip(pairs, weights, value, strict=True))
    expected = sum(P[pair].prod() * x for pair, x in zip(pairs, value, strict=True))
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", get_args(Mode))
def test_a_cap_that_nothing_reaches_changes_nothing(mode):
    offsets = np.arange(4)
    free = weight(mode, math.inf, np.log(P), np.log(Q), offsets=offsets)
    capped = weight(mode, 1.41, np.log(P), np.log(Q), offsets=offsets)
    assert np.sum(Q * free) == pytest.approx(1.0, rel=1e-12)
    np.testing.assert_allclose(capped, free, rtol=1e-12)


@pytest.mark.torch
def test_a_weight_at_its_cap_passes_no_gradient_and_no_overflow():
    import torch

    logp = torch.tensor([500.0], requires_grad=True)
    importance_weight(
        ImportanceSampling(cap=2.0),
        logp=logp,
        logp_sampler=torch.zeros(1),
        loss_mask=torch.ones(1, dtype=torch.bool),
        row_offsets=torch.tensor([0, 1]),
    ).sum().backward()
    assert logp.grad.tolist() == [0.0]


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
def test_a_cap_that_is_not_positive_is_refused(cap):
    with pytest.raises(ConfigError, match="positive"):
        ImportanceSampling(cap=cap)
