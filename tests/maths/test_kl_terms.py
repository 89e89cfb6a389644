"""The KL term: gradients by exact sums over a vocabulary of three, and what must never leak."""

import math
from dataclasses import replace

import numpy as np
import pytest

from klinic.errors import ConfigError, ShapeError
from klinic.maths import kl, kl_terms
from klinic.maths.importance import ImportanceSampling
from klinic.maths.kl_estimators import ESTIMATORS, kl_term
from klinic.maths.kl_inputs import KLInputs, num_saturated

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

LOGITS = torch.tensor([1.0, 0.2, -0.7], dtype=torch.float64)
REF = torch.tensor([0.1, 0.9, -0.2], dtype=torch.float64).log_softmax(-1)
SAMPLER = torch.tensor([0.3, 0.6, -0.1], dtype=torch.float64).log_softmax(-1)


def one_token_each(logits, sampler):
    """Return three completions of one token, one for each token of the vocabulary."""
    rows = logits.log_softmax(-1).expand(3, 3)
    logp = rows.diagonal()
    return KLInputs(
        group=torch.arange(3),
        row_offsets=torch.arange(4),
        logp=logp,
        logp_old=sampler,
        logp_sampler=sampler,
        logp_ref=REF,
        loss_mask=torch.ones(3, dtype=torch.bool),
        kl_exact=kl.exact(logp_p=rows, logp_q=REF.expand(3, 3)),
        kl_topk=kl.topk(logp_p=rows, logp_q=REF.expand(3, 3), k=1),
        importance_sampling=ImportanceSampling(cap=math.inf),
    )


def expected_gradient(name, sampler):
    """Return the mean gradient of a term in the logits, as a sum over the vocabulary."""
    logits = LOGITS.clone().requires_grad_()
    terms = ESTIMATORS[name].term(one_token_each(logits, sampler))
    return torch.autograd.grad((sampler.exp() * terms).sum(), logits)[0]


def gradient_of(objective):
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(objective(logits.log_softmax(-1)), logits)[0]


REVERSE = gradient_of(lambda logp: (logp.exp() * (logp - REF)).sum())
FORWARD = gradient_of(lambda logp: (REF.exp() * (REF - logp)).sum())
CHI_SQUARE = gradient_of(lambda logp: (2 * logp - REF).exp().sum())
POLICY = LOGITS.log_softmax(-1)


@pytest.mark.parametrize(
    "name",
    [
        *("unbiased", "exact", "sequence", "k2", "k3_plus", "k3_ratio"),
        *("k1_reward", "k1_reward_immediate"),
    ],
)
def test_on_policy_these_have_the_gradient_of_the_kl(name):
    torch.testing.assert_close(expected_gradient(name, POLICY), REVERSE, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["unbiased", "exact", "sequence", "k3_ratio"])
def test_off_policy_these_still_have_it_for_one_token(name):
    torch.testing.assert_close(expected_gradient(name, SAMPLER), REVERSE, rtol=1e-12, atol=1e-14)


def test_k1_has_none():
    assert expected_gradient("k1", POLICY).abs().max() < 1e-15


def test_k3_has_that_of_the_other_direction():
    torch.testing.assert_close(expected_gradient("k3", POLICY), FORWARD, rtol=1e-12, atol=1e-14)


def test_the_reversed_k3_has_half_that_of_chi_square():
    torch.testing.assert_close(
        expected_gradient("k3_reversed", POLICY), CHI_SQUARE / 2, rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("name", ["unbiased", "exact", "topk", "sequence"])
def test_what_we_offer_vanishes_at_the_reference(name):
    logits = REF.clone().requires_grad_()
    terms = ESTIMATORS[name].term(one_token_each(logits, REF))
    gradient = torch.autograd.grad((REF.exp() * terms).sum(), logits)[0]
    assert gradient.abs().max() < 1e-15


def pull(name, d, dtype=torch.float32):
    logp = torch.tensor([-0.5 - d], dtype=dtype, requires_grad=True)
    logp_ref = torch.tensor([-0.5], dtype=dtype)
    terms = ESTIMATORS[name].term(KLInputs.on_policy(logp=logp, logp_ref=logp_ref))
    return float(torch.autograd.grad(terms.sum(), logp)[0])


def test_unbiased_pulls_by_d_far_away_in_float32_where_others_break():
    assert pull("unbiased", 60.0) == -60.0
    assert pull("unbiased", 200.0) == -200.0
    assert pull("k3_ratio", 60.0) == -60.0
    assert math.isinf(pull("k3", 200.0))


def test_a_capped_weight_keeps_its_sign_and_is_counted():
    inputs = replace(
        KLInputs.on_policy(
            logp=torch.tensor([-1.0, -1.0], requires_grad=True), logp_ref=torch.tensor([-3.0, 2.0])
        ),
        logp_sampler=torch.tensor([-9.0, -1.0]),
    )
    terms = kl_terms.unbiased(inputs)
    gradient = torch.autograd.grad(terms.sum(), inputs.logp)[0]
    assert gradient.tolist() == [pytest.approx(2 * 2.0), -3.0]
    assert num_saturated(inputs) == 1


def random_inputs(**changes):
    random = np.random.default_rng(3)
    logp, old, ref = (torch.tensor(-random.exponential(size=9)) for _ in range(3))
    fields = {
        "group": torch.tensor([0, 0, 1]),
        "row_offsets": torch.tensor([0, 4, 6, 9]),
        "logp": logp.requires_grad_(),
        "logp_old": old,
        "logp_sampler": old,
        "logp_ref": ref,
        "loss_mask": torch.tensor([True, True, False, True, True, True, True, False, True]),
        "kl_exact": (logp - ref) ** 2 / 2,
        "kl_topk": (logp - ref) ** 2 / 3,
    }
    return KLInputs(**(fields | changes))


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_what_stands_outside_the_mask_changes_nothing(name):
    clean = random_inputs()
    outside = ~clean.loss_mask
    fields = ("logp", "logp_old", "logp_sampler", "logp_ref", "kl_exact", "kl_topk")
    values = {field: getattr(clean, field).detach() for field in fields}
    results = []
    for filling in (0.0, torch.nan, -torch.inf):
        leaves = {
            field: torch.where(outside, filling, value).requires_grad_()
            for field, value in values.items()
        }
        terms = kl_term(name, random_inputs(**leaves), aggregation="constant")
        gradients = torch.autograd.grad(terms.sum(), list(leaves.values()), allow_unused=True)
        used = [gradient for gradient in gradients if gradient is not None]
        assert used
        assert (terms[outside] == 0).all()
        assert all((gradient[outside] == 0).all() for gradient in used)
        results.append([terms.detach(), *used])
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


LOGP, OLD, SAMPLER_LOGP, REF_LOGP = -1.0, -1.5, -1.2, -3.0
W = math.exp(LOGP - SAMPLER_LOGP)
K1, K1_OLD = LOGP - REF_LOGP, OLD - REF_LOGP
NEXT_KL = 0.7


@pytest.mark.parametrize(
    ("name", "value", "pull"),
    [
        ("unbiased", W * K1, W * K1),
        ("sequence", 0.4, W * NEXT_KL),
        ("k1", K1, 1.0),
        ("k2", K1**2 / 2, K1),
        ("k3", math.expm1(-K1) + K1, -math.expm1(-K1)),
        ("k3_plus", math.expm1(-K1) + K1, K1),
        ("k3_ratio", W * (math.expm1(-K1) + K1), W * K1),
        ("k3_reversed", math.expm1(K1) - K1, math.expm1(K1)),
        ("abs", K1, 1.0),
        ("k1_reward", K1_OLD, W * 3 * K1_OLD),
        ("k1_reward_immediate", K1_OLD, W * K1_OLD),
        ("exp_k1_reward", math.exp(K1_OLD) * K1_OLD, W * 3 * math.exp(K1_OLD) * K1_OLD),
    ],
)
def test_off_policy_each_term_by_hand(name, value, pull):
    """A row of four tokens, one of them masked; policy, old policy and sampler all differ."""
    mask = torch.tensor([True, False, True, True])
    logp = torch.full((4,), LOGP, dtype=torch.float64, requires_grad=True)
    kl_exact = torch.tensor([0.4, 99.0, NEXT_KL, 0.0], dtype=torch.float64)
    inputs = KLInputs(
        group=torch.tensor([5]),
        row_offsets=torch.tensor([0, 4]),
        logp=logp,
        logp_old=torch.full((4,), OLD, dtype=torch.float64),
        logp_sampler=torch.full((4,), SAMPLER_LOGP, dtype=torch.float64),
        logp_ref=torch.full((4,), REF_LOGP, dtype=torch.float64),
        loss_mask=mask,
        kl_exact=kl_exact,
    )
    terms = kl_term(name, inputs, aggregation="constant")
    (pulls,) = torch.autograd.grad(terms.sum(), logp)
    assert terms[0].item() == pytest.approx(value)
    assert pulls[0].item() == pytest.approx(pull)
    assert pulls[1].item() == 0


def test_only_trained_tokens_count_as_saturated():
    inputs = replace(random_inputs(), logp_sampler=torch.full((9,), -99.0, dtype=torch.float64))
    assert num_saturated(inputs) == 7


def test_group_numbers_may_be_large_and_negative():
    values, offsets = np.array([1.0, 5.0, 7.0]), np.array([0, 1, 2, 3])
    found = kl_terms.leave_one_out_baseline(values, np.array([10**15, -3, 10**15]), offsets)
    np.testing.assert_allclose(found, [7.0, 0.0, 1.0])


def test_the_baseline_is_the_mean_of_the_others_at_that_position():
    values = np.array([1.0, 2.0, 3.0, 10.0, 20.0, 100.0])
    offsets, group = np.array([0, 3, 5, 6]), np.array([0, 0, 0])
    found = kl_terms.leave_one_out_baseline(values, group, offsets)
    expected = [(10 + 100) / 2, 20 / 2, 0, (1 + 100) / 2, 2 / 2, (1 + 10) / 2]
    np.testing.assert_allclose(found, expected)


def test_a_baseline_never_crosses_groups():
    values, offsets = np.array([1.0, 5.0, 7.0]), np.array([0, 1, 2, 3])
    found = kl_terms.leave_one_out_baseline(values, np.array([4, 0, 4]), offsets)
    np.testing.assert_allclose(found, [7.0, 0.0, 1.0])


def test_sequence_pulls_by_the_future_less_that_of_the_others():
    logp = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    kl_exact = torch.tensor([1.0, 2.0, 4.0, 10.0, 20.0], dtype=torch.float64)
    inputs = KLInputs(
        group=torch.tensor([0, 0]),
        row_offsets=torch.tensor([0, 3, 5]),
        logp=logp,
        logp_old=logp.detach(),
        logp_sampler=logp.detach(),
        logp_ref=logp.detach(),
        loss_mask=torch.ones(5, dtype=torch.bool),
        kl_exact=kl_exact,
    )
    (pulls,) = torch.autograd.grad(kl_terms.sequence(inputs).sum(), logp)
    assert pulls.tolist() == [6 - 20, 4 - 0, 0, 20 - 6, 0 - 4]


def test_no_gradient_flows_through_a_coefficient():
    inputs = random_inputs()
    for name in ("unbiased", "k3_ratio", "k1_reward", "sequence", "exp_k1_reward"):
        terms = kl_term(name, inputs, aggregation="constant")
        (first,) = torch.autograd.grad(terms.sum(), inputs.logp, create_graph=True)
        second = torch.zeros(1)
        if first.requires_grad and name != "sequence":
            (second,) = torch.autograd.grad(first.sum(), inputs.logp)
        assert second.abs().max() == 0, f"{name} is not linear in logp"


@pytest.mark.parametrize("name", ["exact", "topk", "sequence"])
def test_a_missing_vocabulary_is_said_in_a_sentence(name):
    inputs = random_inputs(kl_exact=None, kl_topk=None)
    with pytest.raises(ConfigError, match="whole vocabulary"):
        kl_term(name, inputs, aggregation="constant")


def test_sequence_refuses_the_sequence_mean():
    with pytest.raises(ConfigError, match="constant denominator"):
        kl_term("sequence", random_inputs(), aggregation="sequence_mean")


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="unbiased, exact, topk"):
        kl_term("low_var_kl", random_inputs(), aggregation="constant")


def test_groups_must_fit_the_rows():
    # the shape annotations see it first under pytest; without them the record does
    with pytest.raises((ShapeError, TypeError)):
        random_inputs(group=torch.tensor([0, 0]))


def test_every_name_says_something_to_a_person():
    for estimator in ESTIMATORS.values():
        assert len(estimator.sentence.split()) > 6
        assert estimator.sentence.endswith(".")
