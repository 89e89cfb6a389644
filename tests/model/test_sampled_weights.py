"""The few entries of a tensor that a fingerprint is made of."""

import pytest
import torch

from klinic.model.weights import NUM_SAMPLED, sample_entries

WIDE = torch.arange(7 * 3001.0).reshape(7, 3001)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.0),
        torch.zeros(0),
        torch.arange(float(NUM_SAMPLED)),
        torch.arange(2.0 * NUM_SAMPLED + 1),
        WIDE,
        WIDE.T,  # not in the order of memory
        WIDE[3],  # begins in the middle of memory
        WIDE[:, 5],
    ],
)
def test_entries_are_evenly_spaced_in_any_memory(tensor):
    flat, found = tensor.flatten().tolist(), sample_entries(tensor).tolist()
    spacings = [n for n in range(1, len(flat) // NUM_SAMPLED + 1) if flat[::n] == found]
    assert spacings or found == flat
    assert len(found) <= 2 * NUM_SAMPLED or found == flat


@pytest.mark.parametrize(
    "lost",
    [
        (slice(None, 64), slice(None)),
        (slice(64, None), slice(None)),
        (slice(None), slice(None, 128)),
        (slice(None), slice(128, None)),
    ],
)
def test_half_of_the_rows_or_columns_is_half_of_the_sampled_entries(lost):
    tensor = torch.ones(128, 256)
    tensor[lost] = 0
    assert 0.45 < float(sample_entries(tensor).mean()) < 0.55
