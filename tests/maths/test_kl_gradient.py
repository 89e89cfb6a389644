"""The KL term: gradients by exact sums over a vocabulary of three, and what must never leak."""

import math
from dataclasses import replace

import numpy as np
import pytest

from klinic.errors import ConfigError, ShapeError
from klinic.maths import kl, kl_gradient
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
        ratio_cap=math.inf,
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
    terms = kl_gradient.unbiased(inputs)
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


def test_the_baseline_is_the_mean_of_the_others_at_that_position():
    values = np.array([1.0, 2.0, 3.0, 10.0, 20.0, 100.0])
    offsets, group = np.array([0, 3, 5, 6]), np.array([0, 0, 0])
    found = kl_gradient.others_at_position(values, group, offsets)
    expected = [(10 + 100) / 2, 20 / 2, 0, (1 + 100) / 2, 2 / 2, (1 + 10) / 2]
    np.testing.assert_allclose(found, expected)


def test_a_baseline_never_crosses_groups():
    values, offsets = np.array([1.0, 5.0, 7.0]), np.array([0, 1, 2, 3])
    found = kl_gradient.others_at_position(values, np.array([4, 0, 4]), offsets)
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
    (pulls,) = torch.autograd.grad(kl_gradient.sequence(inputs).sum(), logp)
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
