"""The direction of k3, by sampling and exactly."""

import pytest

from klinic.verify import monte_carlo


@pytest.mark.parametrize(
    "run", [monte_carlo.measure_direction, monte_carlo.measure_importance_sampling]
)
def test_k3_converges_to_the_kl_and_its_reversed_form_to_chi_square(run):
    distances = run()
    assert monte_carlo.all_as_expected(distances)
    for distance in distances:
        found = {estimate.name: estimate for estimate in distance.estimates}
        reversed_mean = found["k3 reversed"].expected
        assert found["k3"].expected == pytest.approx(distance.kl, rel=1e-9)
        assert reversed_mean == pytest.approx(distance.chi_square - distance.kl, rel=1e-9)
        assert reversed_mean - distance.kl == pytest.approx(distance.reversed_error, rel=1e-9)
        assert found["k3"].error < 0.05 * distance.kl + 0.1
        assert found["k3 reversed"].error == pytest.approx(
            abs(distance.reversed_error), rel=0.1, abs=1e-3
        )


def test_far_away_the_reversed_form_is_off_by_hundreds():
    assert monte_carlo.measure_direction()[-1].reversed_error > 100


def test_without_the_ratio_an_older_policy_misleads():
    for distance in monte_carlo.measure_importance_sampling():
        unweighted = next(e for e in distance.estimates if e.name == "k3, unweighted")
        assert not unweighted.right


def test_trl_has_the_same_expression():
    pytest.importorskip("trl")
    for run in (monte_carlo.measure_direction, monte_carlo.measure_importance_sampling):
        for distance in run():
            found = {estimate.name: estimate for estimate in distance.estimates}
            assert found["TRL"].right
            assert found["TRL"].monte_carlo == pytest.approx(found["k3"].monte_carlo, rel=1e-9)
