"""Weights in buckets: all of them, in order, none above the size but a tensor alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from klinic.model.tensor_prints import describe_damage, print_tensor
from klinic.model.weight_stream import StreamPlan, WeightStream, divide_bucket
from klinic.model.weights import rows_of_ranks

SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), max_size=8)
TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def random_tensors(shapes):
    stream = torch.Generator().manual_seed(0)
    return {f"w{n}": torch.randn(shape, generator=stream) for n, shape in enumerate(shapes)}


@given(shapes=SHAPES, dtype=TYPES, size=st.integers(1, 400))
def test_every_tensor_arrives_in_the_dtype_of_the_receiver(shapes, dtype, size):
    tensors = random_tensors(shapes)
    stream = WeightStream(tensors, dtype=dtype, bucket_bytes=size)
    arrived = {}
    for bucket in stream:
        assert bucket.data.nbytes <= size or len(bucket.tensors) == 1
        assert bucket.data.numel() == sum(p.numel() for p in bucket.tensors.values())
        arrived |= {name: p.clone() for name, p in bucket.tensors.items()}
    assert list(arrived) == list(tensors)
    for name, p in tensors.items():
        assert torch.equal(arrived[name], p.to(dtype))
    assert describe_damage(stream.fingerprints, [prints_of(arrived)]) == ""


@given(shapes=SHAPES, dtype=TYPES, size=st.integers(1, 400))
def test_a_receiver_divides_what_a_sender_describes_alike(shapes, dtype, size):
    plan = WeightStream(random_tensors(shapes), dtype=dtype, bucket_bytes=size).plan
    there = StreamPlan.from_json(**plan.as_json())
    assert there == plan
    assert list(there.buckets()) == list(plan.buckets())
    for shapes_of_bucket in there.buckets():
        bucket = divide_bucket(torch.empty(there.largest), shapes_of_bucket)
        assert {name: tuple(p.shape) for name, p in bucket.tensors.items()} == shapes_of_bucket


@given(rows=st.integers(0, 40), size=st.integers(1, 9))
def test_the_rows_of_ranks_are_those_of_torch(rows, size):
    chunks = torch.chunk(torch.arange(rows), size) if rows else ()
    own = [torch.arange(rows)[some] for some in rows_of_ranks(rows, size)]
    assert [part.tolist() for part in own if len(part)] == [c.tolist() for c in chunks if len(c)]


def test_a_stream_that_is_left_early_ends_with_its_last_bucket():
    tensors = random_tensors([(4,), (4,), (4,)])
    with WeightStream(tensors, dtype=torch.float32, bucket_bytes=16) as stream:
        assert len(next(iter(stream)).tensors) == 1
        assert stream.fingerprints == {}
    assert list(stream.fingerprints) == list(tensors)


def prints_of(tensors):
    return {name: print_tensor(p) for name, p in tensors.items()}


DAMAGES = {
    "w1 did not arrive": lambda t: {n: p for n, p in t.items() if n != "w1"},
    "w1 arrived with 2 times its norm": lambda t: {**t, "w1": 2 * t["w1"]},
    "w1 arrived with 1.001 times": lambda t: {**t, "w1": 1.001 * t["w1"]},
    "w1 arrived as w2, w2 arrived as w1": lambda t: {**t, "w1": t["w2"], "w2": t["w1"]},
    "w1 arrived as zeros": lambda t: {**t, "w1": 0 * t["w1"]},
    "w1 arrived with other entries": lambda t: {**t, "w1": t["w1"].flip(0)},
    "w1 arrived with nan times": lambda t: {**t, "w1": t["w1"] / 0 * 0},
    "w1 arrived with 0.996": lambda t: {**t, "w1": lose_shard(t["w1"])},
    "none of the tensors arrived": lambda t: {},
}


def lose_shard(tensor):
    """Lose the rows of one rank of 100."""
    damaged = tensor.clone()
    damaged[37] = 0
    return damaged


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_tensor_is_named_with_what_happened_to_it(message):
    tensors = random_tensors([(20,), (100, 30), (100, 30), (5, 5)])
    sent = prints_of(tensors)
    assert describe_damage(sent, [prints_of(tensors)]) == ""
    damaged = prints_of(DAMAGES[message](tensors))
    assert describe_damage(sent, [prints_of(tensors), damaged]).startswith(message)


def test_weights_that_are_not_finite_arrive_as_they_were_sent():
    sent = prints_of({"w": torch.tensor([math.nan, 1.0]), "v": torch.tensor([math.inf])})
    assert describe_damage(sent, [sent]) == ""


def test_many_damaged_tensors_are_counted():
    sent = prints_of(random_tensors([(9,)] * 7))
    arrived = prints_of({name: torch.ones(9) for name in sent})
    assert describe_damage(sent, [arrived]).endswith(" and 4 more")


def test_a_norm_is_summed_precisely():
    """A float32 sum over so many entries alone would be wrong by a thousandth."""
    tensor = torch.randn(3_000_000, generator=torch.Generator().manual_seed(1))
    assert print_tensor(tensor).norm == pytest.approx(float(tensor.double().norm()), rel=1e-6)
