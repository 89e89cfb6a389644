"""The policy term: gradients by exact sums, clipping, and who may leave the average."""

import numpy as np
import pytest

from klinic.errors import ShapeError
from klinic.maths.kl_estimators import kl_term
from klinic.maths.kl_inputs import KLInputs
from klinic.maths.masked import aggregation_weights, exclude_rows, weighted_sum
from klinic.maths.surrogate import SURROGATES, PolicyInputs

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

LOGITS = torch.tensor([1.0, 0.2, -0.7], dtype=torch.float64)
REWARD = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
NAMES = sorted(SURROGATES)


def weights_of(name, mask, offsets):
    return aggregation_weights(
        SURROGATES[name].aggregation,
        loss_mask=mask,
        row_offsets=offsets,
        length=1,
        dtype=torch.float64,
    )


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_each_is_the_policy_gradient(name):
    """Three completions of one token, weighted by their probability: grad of E[reward]."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    inputs = PolicyInputs(
        advantage=REWARD,
        row_offsets=torch.arange(4),
        logp=logp,
        logp_old=logp.detach(),
        loss_mask=torch.ones(3, dtype=torch.bool),
    )
    terms = SURROGATES[name].term(inputs)
    found = torch.autograd.grad((logp.detach().exp() * terms).sum(), logits, retain_graph=True)[0]
    expected = torch.autograd.grad(-(logp.exp() * REWARD).sum(), logits)[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def pulls(name, log_ratio, advantage, **clips):
    logp = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    inputs = PolicyInputs(
        advantage=torch.tensor([advantage], dtype=torch.float64),
        row_offsets=torch.tensor([0, 1]),
        logp=logp,
        logp_old=torch.zeros(1, dtype=torch.float64),
        loss_mask=torch.tensor([True]),
        **clips,
    )
    return float(torch.autograd.grad(SURROGATES[name].term(inputs).sum(), logp)[0])


@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "pulled"),
    [(1.5, 1.0, False), (1.5, -1.0, True), (0.5, 1.0, True), (0.5, -1.0, False), (1.1, 1.0, True)],
)
def test_clipping_is_pessimistic(name, ratio, advantage, pulled):
    pull = pulls(name, np.log(ratio), advantage)
    assert pull == pytest.approx(-ratio * advantage if pulled else 0.0, abs=1e-12)


def test_bounds_may_differ():
    assert pulls("dapo", np.log(1.25), 1.0, clip_high=0.28) != 0
    assert pulls("dapo", np.log(1.25), 1.0, clip_high=0.2) == 0
    assert pulls("dapo", np.log(0.75), -1.0, clip_low=0.3, clip_high=0.1) != 0
    assert pulls("dapo", np.log(0.75), -1.0, clip_low=0.1, clip_high=0.3) == 0
    assert pulls("cispo", np.log(5.0), 1.0, clip_low=0.1, clip_high=0.3) == pytest.approx(-1.3)


def test_each_name_has_its_average():
    assert {name: surrogate.aggregation for name, surrogate in SURROGATES.items()} == {
        "grpo": "sequence_mean",
        "dr_grpo": "constant",
        "bnpo": "token_mean",
        "dapo": "token_mean",
        "gspo": "sequence_mean",
        "cispo": "token_mean",
    }


@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize(("advantage", "value"), [(1.0, -1.2), (0.0, 0.0)])
def test_a_ratio_that_overflows_leaves_a_clipped_token_finite(name, advantage, value):
    logp = torch.tensor([0.0], requires_grad=True)
    inputs = PolicyInputs(
        advantage=torch.tensor([advantage]),
        row_offsets=torch.tensor([0, 1]),
        logp=logp,
        logp_old=torch.tensor([-100.0]),
        loss_mask=torch.tensor([True]),
    )
    term = SURROGATES[name].term(inputs).sum()
    assert term.item() == pytest.approx(value)
    assert torch.autograd.grad(term, logp)[0].item() == 0


def test_cispo_shows_its_weighted_advantage():
    inputs = PolicyInputs(
        advantage=torch.tensor([2.0]),
        row_offsets=torch.tensor([0, 1]),
        logp=torch.zeros(1),
        logp_old=torch.zeros(1),
        loss_mask=torch.tensor([True]),
    )
    assert SURROGATES["cispo"].term(inputs).tolist() == [-2.0]


def test_cispo_keeps_every_gradient_and_bounds_its_weight():
    assert pulls("cispo", np.log(5.0), 1.0) == pytest.approx(-1.2)
    assert pulls("cispo", np.log(0.1), 1.0) == pytest.approx(-0.1)


def test_gspo_spreads_one_ratio_over_the_row():
    logp = torch.tensor([0.3, -0.1], dtype=torch.float64, requires_grad=True)
    inputs = PolicyInputs(
        advantage=torch.tensor([1.0], dtype=torch.float64),
        row_offsets=torch.tensor([0, 2]),
        logp=logp,
        logp_old=torch.zeros(2, dtype=torch.float64),
        loss_mask=torch.tensor([True, True]),
    )
    terms = SURROGATES["gspo"].term(inputs)
    weights = weights_of("gspo", inputs.loss_mask, inputs.row_offsets)
    gradient = torch.autograd.grad(weighted_sum(terms, weights), logp)[0]
    torch.testing.assert_close(gradient, torch.full((2,), -np.exp(0.1) / 2, dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_nan_outside_the_mask_leaks_into_neither_value_nor_gradient(name):
    logp = torch.tensor([-1.0, torch.nan, -2.0], dtype=torch.float64, requires_grad=True)
    inputs = PolicyInputs(
        advantage=torch.tensor([1.0, -1.0], dtype=torch.float64),
        row_offsets=torch.tensor([0, 2, 3]),
        logp=logp,
        logp_old=torch.tensor([-1.1, torch.inf, -2.0], dtype=torch.float64),
        loss_mask=torch.tensor([True, False, True]),
    )
    terms = SURROGATES[name].term(inputs)
    (gradient,) = torch.autograd.grad(terms.sum(), logp)
    assert torch.isfinite(terms).all()
    assert torch.isfinite(gradient).all()
    assert gradient[1] == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_completion_leaves_the_policy_term_and_keeps_its_kl(name):
    """The step with a dropped row equals the step without it, but for the KL term."""
    logp = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    old = logp.detach() + 0.01
    mask, offsets = torch.ones(3, dtype=torch.bool), torch.tensor([0, 2, 3])
    advantage = torch.tensor([1.0, -1.0], dtype=torch.float64)
    kept = exclude_rows(mask, torch.tensor([False, True]), offsets)
    terms = SURROGATES[name].term(
        PolicyInputs(
            advantage=advantage, row_offsets=offsets, logp=logp, logp_old=old, loss_mask=mask
        )
    )
    with_row = weighted_sum(terms, weights_of(name, kept, offsets))
    alone = SURROGATES[name].term(
        PolicyInputs(
            advantage=advantage[:1],
            row_offsets=offsets[:2],
            logp=logp[:2],
            logp_old=old[:2],
            loss_mask=mask[:2],
        )
    )
    without_row = weighted_sum(alone, weights_of(name, mask[:2], offsets[:2]))
    assert float(with_row.detach()) == pytest.approx(float(without_row.detach()), rel=1e-12)

    inputs = KLInputs(
        group=torch.tensor([0, 0]),
        row_offsets=offsets,
        logp=logp,
        logp_old=old,
        logp_sampler=old,
        logp_ref=logp.detach() - 1,
        loss_mask=mask,
    )
    kl = weighted_sum(
        kl_term("unbiased", inputs, aggregation="constant"), weights_of(name, mask, offsets)
    )
    assert torch.autograd.grad(kl, logp)[0][2] != 0


def test_one_advantage_a_row():
    with pytest.raises((ShapeError, TypeError)):
        PolicyInputs(
            advantage=torch.zeros(3),
            row_offsets=torch.tensor([0, 1]),
            logp=torch.zeros(1),
            logp_old=torch.zeros(1),
            loss_mask=torch.tensor([True]),
        )
