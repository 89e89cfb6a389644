"""TRL's own KL expression beside ours: value and gradient."""

import pytest
import torch

pytest.importorskip("trl")

from klinic.integrations.trl import mean_kl
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.maths.kl_inputs import KLInputs

LOGP = torch.tensor([[-1.0, -2.0, -0.3]], dtype=torch.float64)
LOGP_REF = torch.tensor([[-1.5, -1.0, -0.3]], dtype=torch.float64)


def trl_gradient(logp, logp_ref, *, bias_correction):
    logp = logp.clone().requires_grad_()
    value = mean_kl(logp=logp, logp_ref=logp_ref, bias_correction=bias_correction)
    return value.item(), torch.autograd.grad(value, logp)[0][0] * logp.numel()


def our_gradient(name):
    logp = LOGP[0].clone().requires_grad_()
    terms = ESTIMATORS[name].term(KLInputs.on_policy(logp=logp, logp_ref=LOGP_REF[0]))
    return terms.mean().item(), torch.autograd.grad(terms.sum(), logp)[0]


@pytest.mark.parametrize(("bias_correction", "name"), [(True, "k3_ratio"), (False, "k3")])
def test_trl_agrees_with_the_form_of_that_name(bias_correction, name):
    theirs = trl_gradient(LOGP, LOGP_REF, bias_correction=bias_correction)
    ours = our_gradient(name)
    assert theirs[0] == pytest.approx(ours[0], rel=1e-12)
    torch.testing.assert_close(theirs[1], ours[1], rtol=1e-12, atol=1e-14)


def test_in_float32_trl_loses_the_gradient_far_from_the_reference():
    _, gradient = trl_gradient(
        torch.tensor([[-30.5]]), torch.tensor([[-0.5]]), bias_correction=True
    )
    assert gradient.item() != pytest.approx(-30.0, rel=0.1)
