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
    flat = tensor.flatten().tolist()
    assert sample_entries(tensor).tolist() == flat[:: max(1, len(flat) // NUM_SAMPLED)]
