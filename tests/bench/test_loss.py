"""The sides of the loss measurement compute the same."""

import pytest
from bench.loss import Given, full, klinic, trl


@pytest.mark.parametrize("head", ["frozen", "trainable"])
@pytest.mark.parametrize("side", [klinic, trl])
def test_all_sides_have_the_same_gradient(side, head):
    given = Given(24, head, vocabulary=64)
    wanted = full(given)
    assert float((side(given) - wanted).norm()) < 1e-5 * float(wanted.norm())
