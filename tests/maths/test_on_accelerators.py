"""Formulas that take another way on an accelerator, where the host must not wait: same results."""

import pytest

from klinic.maths import arrays
from klinic.maths.kl_terms import leave_one_out_baseline

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

OFFSETS = torch.tensor([0, 3, 3, 4, 9])
GROUP = torch.tensor([700, -1, 700, -1])


@pytest.fixture
def values():
    return torch.rand(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("sums", [arrays.sum_to_go, arrays.sum_after])
def test_sums_over_a_row_need_no_longest_row(values, sums, monkeypatch):
    expected = sums(values, OFFSETS)
    monkeypatch.setattr(arrays, "is_on_host", lambda _: False)
    assert torch.equal(sums(values, OFFSETS), expected)


def test_groups_are_numbered_without_counting_them(values, monkeypatch):
    expected = leave_one_out_baseline(values, GROUP, OFFSETS)
    monkeypatch.setattr(arrays, "is_on_host", lambda _: False)
    ids = arrays.dense_ids(GROUP)
    assert int(ids.max()) < len(GROUP)
    assert torch.equal(ids[:, None] == ids, GROUP[:, None] == GROUP)
    assert torch.allclose(leave_one_out_baseline(values, GROUP, OFFSETS), expected, rtol=1e-15)
