"""Weights that ZeRO-3 splits, by parameters with the attributes that DeepSpeed gives them."""

import math

import pytest
import torch

from klinic.model import weights, zero_shards
from klinic.model.loading import num_parameters


def split_parameter(full, size, rank):
    """Return what process `rank` of `size` holds of a tensor: equal parts, the last one padded."""
    part = math.ceil(full.numel() / size)
    padded = torch.cat([full.reshape(-1), torch.full((part * size - full.numel(),), torch.nan)])
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.ds_shape = full.shape
    parameter.ds_tensor = padded[rank * part : (rank + 1) * part]
    parameter.ds_process_group = rank
    return parameter


@pytest.fixture(autouse=True)
def ranks_by_group(monkeypatch):
    monkeypatch.setattr(zero_shards.dist, "get_rank", lambda group: group)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", [(1,), (7,), (13, 11), (64, 65), (3, 1000)])
def test_the_samples_of_all_processes_are_those_of_the_full_tensor(shape, size):
    full = torch.arange(1.0, math.prod(shape) + 1).reshape(shape)
    parts = [split_parameter(full, size, rank) for rank in range(size)]
    samples = torch.stack([weights._local_samples(part) for part in parts])
    assert (samples != 0).sum(0).eq(1).all()  # each entry comes from one process
    assert torch.equal(samples.sum(0), weights.sample_entries(full))


def test_the_fingerprint_of_one_process_is_that_of_the_full_tensor(monkeypatch):
    monkeypatch.setattr(zero_shards, "sum_over_processes", lambda values, _: values)
    full = torch.arange(500.0).reshape(20, 25)
    part = split_parameter(full, 1, 0)
    assert weights.sampled_digest({"w": part}) == weights.sampled_digest({"w": full})
    part.ds_tensor = part.ds_tensor + 1
    assert weights.sampled_digest({"w": part}) != weights.sampled_digest({"w": full})


def test_parameters_are_counted_whole():
    module = torch.nn.Module()
    module.weight = split_parameter(torch.zeros(6, 7), 2, 1)
    assert num_parameters(module) == {"num_parameters": 42, "num_trainable": 42}
    assert zero_shards.full_shape(torch.zeros(2, 3)) == (2, 3)
