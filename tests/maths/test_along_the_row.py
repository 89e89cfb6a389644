"""Which terms look at other tokens of their row: what is declared is what is so."""

import pytest

from klinic.maths.kl_estimators import ESTIMATORS
from klinic.maths.kl_inputs import KLInputs
from klinic.maths.surrogate import SURROGATES, PolicyInputs

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

TOKENS = {
    "logp": torch.tensor([0.5, 0.2, 0.9, 0.4, 0.3]).log(),
    "logp_old": torch.tensor([0.4, 0.3, 0.9, 0.4, 0.1]).log(),
    "logp_sampler": torch.tensor([0.4, 0.25, 0.9, 0.4, 0.1]).log(),
    "logp_ref": torch.tensor([0.3, 0.3, 0.8, 0.7, 0.3]).log(),
    "kl_exact": torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]),
    "kl_topk": torch.tensor([0.1, 0.1, 0.2, 0.3, 0.4]),
}
LEARNT = ("logp", "kl_exact", "kl_topk")
EVERYWHERE = torch.ones(5, dtype=torch.bool)
OFFSETS = torch.tensor([0, 3, 5])


def seen_at(term, tokens):
    """Return value and gradients of the summed term, a column a token."""
    leaves = {name: tokens[name].clone().requires_grad_() for name in LEARNT}
    values = term({**tokens, **leaves})
    gradients = torch.autograd.grad(values.sum(), list(leaves.values()), allow_unused=True)
    known = [torch.zeros(5) if g is None else g for g in gradients]
    return torch.stack([values.detach(), *known])


def reaches_others(term):
    """Whether any column of the second token changes value or gradient at another one."""
    before = seen_at(term, TOKENS)
    for name, values in TOKENS.items():
        moved = values.clone()
        moved[1] -= 0.05
        after = seen_at(term, {**TOKENS, name: moved})
        if (after != before)[:, [0, 2, 3, 4]].any():
            return True
    return False


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_terms(name):
    def term(tokens):
        rows = {"row_offsets": OFFSETS, "group": torch.tensor([0, 1])}
        return ESTIMATORS[name].term(
            KLInputs(**rows, **tokens, loss_mask=EVERYWHERE).zero_outside_mask()
        )

    assert reaches_others(term) == ESTIMATORS[name].needs_whole_row


@pytest.mark.parametrize("name", SURROGATES)
def test_policy_terms(name):
    def term(tokens):
        return SURROGATES[name].term(
            PolicyInputs(
                advantage=torch.tensor([1.0, -1.0]),
                row_offsets=OFFSETS,
                loss_mask=EVERYWHERE,
                logp=tokens["logp"],
                logp_old=tokens["logp_old"],
            )
        )

    assert reaches_others(term) == SURROGATES[name].needs_whole_row
