"""Values of the KL, by exact sums over a small vocabulary."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from klinic.errors import ConfigError
from klinic.maths import kl

P = np.array([0.7, 0.2, 0.1])
Q = np.array([0.5, 0.3, 0.2])
KL = float(np.sum(P * np.log(P / Q)))
BOTH = {"logp_p": np.log(P), "logp_q": np.log(Q)}

LOGITS = arrays(np.float64, 6, elements=st.floats(-20, 20))


def log_softmax(logits):
    return logits - np.logaddexp.reduce(logits)


@pytest.mark.parametrize("estimator", [kl.k1, kl.k3])
def test_expectation_under_p_is_the_kl(estimator):
    assert np.sum(P * estimator(**BOTH)) == pytest.approx(KL, rel=1e-12)


def test_the_reversed_k3_is_chi_square_minus_the_kl():
    reversed_k3 = kl.k3(logp_p=np.log(Q), logp_q=np.log(P))
    chi_square = np.sum(P**2 / Q) - 1
    assert np.sum(P * reversed_k3) == pytest.approx(chi_square - KL, rel=1e-12)


def test_k2_is_half_the_mean_square_of_the_log_ratio():
    expected = np.sum(P * np.log(P / Q) ** 2) / 2
    assert np.sum(P * kl.k2(**BOTH)) == pytest.approx(expected, rel=1e-12)


def test_absolute_is_the_mean_absolute_log_ratio():
    assert np.sum(P * kl.absolute(**BOTH)) == pytest.approx(
        np.sum(P * np.abs(np.log(P / Q))), rel=1e-12
    )


def test_exact_is_the_kl_in_the_direction_of_its_arguments():
    forward = float(np.sum(Q * np.log(Q / P)))
    assert kl.exact(**BOTH) == pytest.approx(KL, rel=1e-12)
    assert kl.exact(logp_p=np.log(Q), logp_q=np.log(P)) == pytest.approx(forward, rel=1e-12)
    assert pytest.approx(forward, rel=1e-3) != KL


def test_topk_buckets_what_it_does_not_keep():
    expected = 0.7 * math.log(0.7 / 0.5) + 0.3 * math.log(0.3 / 0.5)
    assert kl.topk(**BOTH, k=1) == pytest.approx(expected, rel=1e-12)


@given(LOGITS, LOGITS)
def test_k3_is_never_negative_and_topk_never_above_exact(logits_p, logits_q):
    logp_p, logp_q = log_softmax(logits_p), log_softmax(logits_q)
    exact = kl.exact(logp_p=logp_p, logp_q=logp_q)
    bounds = [kl.topk(logp_p=logp_p, logp_q=logp_q, k=k) for k in range(1, 6)]
    assert (kl.k3(logp_p=logp_p, logp_q=logp_q) >= 0).all()
    assert np.all(np.diff([*bounds, exact]) >= -1e-9 * max(1.0, exact))


@given(LOGITS, LOGITS)
def test_k1_and_k3_have_the_exact_kl_as_their_mean(logits_p, logits_q):
    logp = {"logp_p": log_softmax(logits_p), "logp_q": log_softmax(logits_q)}
    exact = kl.exact(**logp)
    for estimator in (kl.k1, kl.k3):
        mean = np.sum(np.exp(logp["logp_p"]) * estimator(**logp))
        assert mean == pytest.approx(exact, rel=1e-9, abs=1e-9)


def test_k3_keeps_its_digits_in_float32_where_the_usual_form_has_none():
    d = np.float32(1e-4)
    truth = math.expm1(float(d)) - float(d)
    value = kl.k3(logp_p=np.zeros(1, np.float32), logp_q=np.array([d]))
    usual = np.exp(d) - np.float32(1) - d
    assert float(value[0]) == pytest.approx(truth, rel=1e-2)
    assert abs(float(usual) / truth - 1) > 0.5


def test_a_reference_that_excludes_a_token_makes_the_kl_infinite():
    logp_q = np.array([0.0, -math.inf])
    assert kl.exact(logp_p=np.log([0.5, 0.5]), logp_q=logp_q) == math.inf


@pytest.mark.torch
def test_excluded_tokens_leave_the_gradient_finite():
    import torch

    logits = torch.tensor([1.0, 2.0, -math.inf], dtype=torch.float64, requires_grad=True)
    logp_q = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log()
    kl.exact(logp_p=logits.log_softmax(-1), logp_q=logp_q).backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad.abs().max() > 0.1


@pytest.mark.torch
@pytest.mark.parametrize("k", [2, 3])
def test_a_policy_with_nothing_left_for_the_rest_has_a_finite_topk_gradient(k):
    import torch

    logits = torch.tensor([1.0, 2.0, -math.inf, -math.inf], dtype=torch.float64, requires_grad=True)
    logp_q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    logp_p = logits.log_softmax(-1)
    value = kl.topk(logp_p=logp_p, logp_q=logp_q, k=k)
    value.backward()
    exact = kl.exact(logp_p=logp_p.detach(), logp_q=logp_q)
    assert value.item() == pytest.approx(exact.item())
    assert torch.isfinite(logits.grad).all()


def test_an_outcome_too_rare_for_float32_adds_nothing():
    logp_p = np.array([0.0, -110.0], dtype=np.float32)
    logp_q = np.array([0.0, -math.inf], dtype=np.float32)
    assert kl.exact(logp_p=logp_p, logp_q=logp_q) == 0


@pytest.mark.torch
def test_a_small_rest_keeps_its_digits_in_float32():
    import torch

    logits = torch.tensor([0.0, -18.0, -19.0, -20.0])
    ids = torch.tensor([0])
    rest = kl.coarse_logp(logp=logits.log_softmax(-1), token_ids=ids)[-1]
    truth = logits.double().log_softmax(-1)[1:].logsumexp(-1)
    assert float(rest) == pytest.approx(float(truth), rel=1e-6)


@pytest.mark.parametrize("k", [0, 3, -1])
def test_topk_refuses_to_keep_none_or_all(k):
    with pytest.raises(ConfigError, match="rest bucket"):
        kl.topk(**BOTH, k=k)


def test_arguments_are_named_so_that_a_direction_is_seen():
    with pytest.raises(TypeError):
        kl.k3(np.log(P), np.log(Q))


def test_lists_are_refused_with_a_sentence():
    from klinic.maths.arrays import array_namespace

    with pytest.raises(TypeError, match=r"np\.asarray"):
        array_namespace([1.0])
