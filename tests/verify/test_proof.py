"""`klinic verify` itself: what it must show, and that it shows it."""

from dataclasses import replace
from math import isnan, nan

import pytest

from klinic.cli.verify import verify
from klinic.maths.kl_estimators import ESTIMATORS, Gradient
from klinic.verify.estimators import WorldSet, promise_error
from klinic.verify.identify import identify_gradient, worst_error
from klinic.verify.identity_check import IdentityCheck
from klinic.verify.proof import Proof, prove
from klinic.verify.toy_policies import make_world

OFFERED = ["unbiased", "exact", "topk", "sequence"]


@pytest.fixture(scope="module")
def proof() -> Proof:
    return prove()


@pytest.fixture(scope="module")
def rows(proof):
    return {row.name: row for row in proof.rows}


def test_everything_holds_to_nine_digits(proof):
    assert [check.statement for check in proof.checks if not check.ok] == []
    assert proof.ok
    assert proof.worst_identity_error < 1e-12


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_fit_the_terminal_and_break_no_word(proof, monkeypatch, capsys, width):
    monkeypatch.setattr("klinic.verify.proof.prove", lambda _: proof)
    monkeypatch.setenv("COLUMNS", str(width))
    verify()
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= width
    assert "…" not in printed
    assert "identities hold" in printed
    words = {
        word for row in proof.rows for word in (row.name, row.identity, row.verdict_off_policy)
    }
    words |= {word for row in proof.correction for word in (row.mode, row.term)}
    assert {word for word in words if word not in printed} <= {"exact", "topk"}


def test_one_nan_anywhere_is_not_passed_over():
    """`max` passes over a NaN that does not come first; a proof must not."""
    fresh = [make_world(name, seed=1, drift=1.0, shared=True) for name in ("one", "far")]
    setting = WorldSet.from_worlds(fresh)
    poisoned = replace(
        setting.term_moments["k1"][1], gradient=setting.term_moments["k1"][1].gradient * nan
    )
    setting.term_moments["k1"][1] = poisoned
    assert isnan(promise_error(ESTIMATORS["k1"], setting))
    assert identify_gradient(setting.term_moments["k1"], setting.targets).target is None
    assert isnan(worst_error([1.0, nan, 2.0]))
    assert not IdentityCheck(name="", statement="", error=nan).ok


def test_every_name_has_a_row_and_keeps_its_promise(rows):
    assert list(rows) == list(ESTIMATORS)
    assert all(row.ok for row in rows.values())
    assert [name for name, row in rows.items() if row.kind == "offered"] == OFFERED


@pytest.mark.parametrize(
    ("name", "gradient", "identity", "verdict", "off_policy"),
    [
        ("unbiased", "reverse_token", "reverse_token", "correct", "correct"),
        ("exact", "reverse_token", "reverse_token", "correct", "correct"),
        ("topk", "other", "bucket_token", "correct", "correct"),
        ("sequence", "reverse_sequence", "reverse_sequence", "correct", "conditional"),
        ("k1", "zero", "zero", "wrong", "wrong"),
        ("k2", "reverse_token", "reverse_token", "correct", "conditional"),
        ("k3", "forward_token", "forward_token", "conditional", "wrong"),
        ("k3_plus", "reverse_token", "reverse_token", "correct", "conditional"),
        ("k3_ratio", "reverse_token", "reverse_token", "correct", "correct"),
        ("k3_reversed", "other", "half_chi_square", "wrong", "wrong"),
        ("abs", "other", "sign_token", "wrong", "wrong"),
        ("k1_reward", "reverse_sequence", "reverse_sequence", "correct", "conditional"),
        ("k1_reward_immediate", "reverse_token", "reverse_token", "correct", "conditional"),
        ("exp_k1_reward", "other", "exp_k1_cost", "wrong", "wrong"),
    ],
)
def test_the_table_says_what_theory_says(rows, name, gradient, identity, verdict, off_policy):
    row = rows[name]
    assert (row.gradient, row.identity) == (Gradient(gradient), identity)
    assert (row.verdict, row.verdict_off_policy) == (verdict, off_policy)


def test_the_bias_of_sequence_off_policy_is_shown(rows):
    assert rows["sequence"].bias < 1e-9
    assert rows["sequence"].bias_off_policy > 0.05
    assert rows["unbiased"].gradient_off_policy is Gradient.REVERSE_TOKEN_OFF_POLICY


def test_ranges_over_random_worlds_are_those_of_the_identities(rows):
    whole, token, exact = (rows[name].over_worlds for name in ("sequence", "unbiased", "exact"))
    assert whole.bias.high < 1e-9
    assert whole.cosine.low > 1 - 1e-9
    assert token.bias.median == pytest.approx(exact.bias.median, abs=1e-9)
    assert 0.1 < token.bias.low + 0.1 < token.bias.median < token.bias.high
    assert exact.variance.median < token.variance.median
    assert rows["k1"].over_worlds.cosine.high == 0  # no direction: the gradient is zero
    assert rows["exp_k1_reward"].over_worlds.opposed > 0


def test_truncated_worlds_are_part_of_the_proof(rows):
    assert {"top-p", "top-k shared"} <= set(rows["unbiased"].by_world)
    assert rows["sequence"].by_world["top-p"]["bias"] < 1e-9
    assert abs(rows["k3"].by_world["top-p"]["value_bias"]) < 1e-9


def test_noise_is_ordered_as_theory_orders_it(rows):
    for world in rows["k3"].by_world:
        variance = {name: row.by_world[world]["variance"] for name, row in rows.items()}
        assert variance["exact"] < variance["unbiased"] <= variance["k3"]
        assert variance["sequence"] < variance["k1_reward"]


def test_the_cap_costs_more_the_older_the_sampler(rows):
    biases = [entry.bias for entry in rows["unbiased"].cap_bias_by_drift]
    assert biases == sorted(biases)
    assert biases[0] < 1e-3
    assert rows["exact"].cap_bias == 0


def test_extremes_are_named(rows):
    assert not rows["unbiased"].extremes.overflows_at
    assert not rows["unbiased"].extremes.saturates_at
    assert rows["k3"].extremes.overflows_at.above == pytest.approx(88.72, abs=0.02)
    assert rows["k3_reversed"].extremes.overflows_at.below == pytest.approx(-88.72, abs=0.02)


def test_only_a_constant_denominator_keeps_the_identity(proof):
    for row in proof.aggregation:
        if row.refused:
            assert (row.estimator, row.aggregation) == ("sequence", "sequence_mean")
        elif row.aggregation == "constant":
            assert row.deviation < 1e-12
            assert row.scale == pytest.approx(1 / 3)
        else:
            assert row.deviation > 1e-3


def test_a_coefficient_means_something_else_under_each_advantage(proof):
    found = {(row.advantage, row.success_rate): row.coefficient for row in proof.advantage}
    assert found["leave_one_out", 0.5] == pytest.approx(1.0)
    assert found["group_mean", 0.1] == pytest.approx(8 / 7)
    assert found["group_std", 0.5] == pytest.approx(0.5, rel=0.1)
    assert found["batch", 0.1] == pytest.approx(0.3, rel=0.05)
