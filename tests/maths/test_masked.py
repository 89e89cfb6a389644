"""Weights and sums over flat tokens."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.errors import ConfigError, ShapeError
from klinic.maths.arrays import check_rows, row_of_token, sum_after, sum_to_go
from klinic.maths.masked import (
    MaskTotals,
    aggregation_weights,
    apply_mask,
    constant,
    exclude_rows,
    sequence_mean,
    token_mean,
    weighted_sum,
)

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def batch(lengths, seed=0):
    """Return values, mask and offsets of rows with the given lengths, and the rows as lists."""
    random = np.random.default_rng(seed)
    offsets = np.cumsum([0, *lengths])
    values, mask = random.normal(size=offsets[-1]), random.random(offsets[-1]) < 0.7
    rows = [values[a:b][mask[a:b]] for a, b in pairwise(offsets)]
    return values, mask, offsets, [row for row in rows if len(row)]


@given(LENGTHS)
def test_each_mean_is_what_its_name_says(lengths):
    values, mask, offsets, rows = batch(lengths)
    flat = np.concatenate(rows) if rows else np.zeros(1)
    expected = {
        "token_mean": flat.mean(),
        "sequence_mean": np.mean([row.mean() for row in rows]) if rows else 0.0,
        "constant": np.mean([row.sum() / 7 for row in rows]) if rows else 0.0,
    }
    for aggregation, mean in expected.items():
        weights = aggregation_weights(
            aggregation, loss_mask=mask, row_offsets=offsets, length=7, dtype=np.float64
        )
        assert weighted_sum(values, weights) == pytest.approx(mean, abs=1e-12)


@given(LENGTHS)
def test_rows_of_one_process_weigh_what_they_weigh_in_the_step(lengths):
    _, mask, offsets, rows = batch(lengths)
    counts = MaskTotals(num_tokens=mask.sum(), num_rows=np.int64(len(rows)))
    cut = len(offsets) // 2
    first, rest = mask[: offsets[cut]], mask[offsets[cut] :]
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        shared = {"length": 7, "dtype": np.float32}
        whole = aggregation_weights(aggregation, loss_mask=mask, row_offsets=offsets, **shared)
        parts = [
            aggregation_weights(
                aggregation, loss_mask=part, row_offsets=part_offsets, totals=counts, **shared
            )
            for part, part_offsets in (
                (first, offsets[: cut + 1]),
                (rest, offsets[cut:] - offsets[cut]),
            )
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@given(LENGTHS)
def test_micro_batches_do_not_change_a_sum(lengths):
    values, mask, offsets, _ = batch(lengths)
    weights = sequence_mean(mask, offsets, dtype=np.float64)
    cut = int(offsets[len(offsets) // 2])
    parts = weighted_sum(values[:cut], weights[:cut]) + weighted_sum(values[cut:], weights[cut:])
    assert parts == pytest.approx(weighted_sum(values, weights), abs=1e-12)


@pytest.mark.torch
def test_nan_outside_the_mask_leaks_into_neither_value_nor_gradient():
    import torch

    values = torch.tensor([1.0, torch.nan, torch.inf], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, False, False])
    cleaned = apply_mask(values, mask)
    total = weighted_sum(cleaned.exp() * cleaned, token_mean(mask, dtype=torch.float64))
    total.backward()
    assert total.item() == pytest.approx(np.e)
    assert values.grad.tolist() == [pytest.approx(2 * np.e), 0.0, 0.0]


@pytest.mark.torch
def test_weighted_sum_itself_stops_nan():
    import torch

    values = torch.tensor([1.0, torch.nan], requires_grad=True)
    weighted_sum(values, torch.tensor([0.5, 0.0])).backward()
    assert values.grad.tolist() == [0.5, 0.0]


def test_dropped_rows_leave_numerator_and_denominator():
    values = np.array([1.0, 1.0, 5.0, 5.0])
    mask, offsets = np.ones(4, dtype=bool), np.array([0, 2, 4])
    kept = exclude_rows(mask, np.array([False, True]), offsets)
    for weights in (
        token_mean(kept, dtype=np.float64),
        sequence_mean(kept, offsets, dtype=np.float64),
        constant(kept, offsets, length=2, dtype=np.float64),
    ):
        assert weighted_sum(values, weights) == pytest.approx(1.0)


def test_weights_have_the_asked_precision():
    mask, offsets = np.array([True] * 3), np.array([0, 1, 3])
    assert sequence_mean(mask, offsets, dtype=np.float32).dtype == np.float32
    assert token_mean(mask, dtype=np.float64)[0] == 1 / 3


@pytest.mark.torch
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_half_precision_counts_as_well_as_double(name):
    import torch

    mask, offsets = torch.ones(3000, dtype=torch.bool), torch.tensor([0, 1000, 3000])
    weights = sequence_mean(mask, offsets, dtype=getattr(torch, name))
    assert float(weights.double().sum()) == pytest.approx(1.0, rel=5e-3)


def test_a_constant_length_of_zero_is_refused():
    with pytest.raises(ConfigError, match="maximum completion length of sampling"):
        constant(np.array([True]), np.array([0, 1]), length=0, dtype=np.float64)


def test_tokens_know_their_row_even_beside_empty_ones(array):
    assert row_of_token(array([0, 0, 2, 2, 3])).tolist() == [1, 1, 3]


def test_sums_to_go_stay_in_their_row(array):
    values = array([np.nan, 1.0, 2.0, 4.0])
    assert sum_to_go(values, array([0, 1, 4])).tolist()[1:] == [7.0, 6.0, 4.0]


def test_a_later_value_survives_a_large_one(array):
    values = array(np.array([1e8, 1e-4, 2e-4], dtype=np.float32))
    later = sum_after(values, array([0, 3]))
    assert later.tolist() == pytest.approx([3e-4, 2e-4, 0.0])


@given(LENGTHS)
def test_sums_to_go_are_running_sums_from_the_end(lengths):
    values, _, offsets, _ = batch(lengths)
    expected = [values[a:b][::-1].cumsum()[::-1] for a, b in pairwise(offsets)]
    np.testing.assert_allclose(sum_to_go(values, offsets), np.concatenate(expected), atol=1e-12)


@pytest.mark.parametrize("offsets", [[1, 3], [0, 3, 2]])
def test_offsets_that_describe_no_rows_are_refused(offsets):
    with pytest.raises(ShapeError, match="never decrease"):
        check_rows(np.array(offsets), logp=np.zeros(3))
