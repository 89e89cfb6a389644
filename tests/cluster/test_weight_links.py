"""Weights arrive as they were sent, in memory and over the network; nobody waits for ever."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from klinic.cluster import weight_links
from klinic.cluster.session import free_port
from klinic.cluster.weight_links import BroadcastLink, GroupLostError, open_link
from klinic.sampler.weight_group import LOOPBACK, TCP

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=5)
TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8])


def some(shapes, types):
    stream = torch.Generator().manual_seed(0)
    return {
        f"w{number}": (torch.randn(shape, generator=stream) * 10).to(kind)
        for number, (shape, kind) in enumerate(zip(shapes, types, strict=True))
    }


def empty(tensors):
    return {name: torch.zeros_like(p) for name, p in tensors.items()}


@given(data=st.data())
def test_all_shapes_and_types_arrive_through_memory(tmp_path_factory, data):
    shapes = data.draw(SHAPES)
    types = data.draw(st.lists(TYPES, min_size=len(shapes), max_size=len(shapes)))
    path = str(tmp_path_factory.mktemp("memory") / "weights")
    sent = some(shapes, types)
    first, second = (open_link(path, empty(sent), rank=rank, size=2) for rank in range(2))
    for factor in (1, 2):  # it is used many times
        now = {name: p * factor for name, p in sent.items()}
        first.send(now)
        arrived = empty(sent)
        second.receive(arrived)
        assert all(torch.equal(now[name], arrived[name]) for name in now)


@pytest.fixture
def pair(monkeypatch):
    """Both ends of a link over the network, on this machine."""
    monkeypatch.setattr(weight_links, "local_address", lambda **_: LOOPBACK)
    monkeypatch.setattr(weight_links, "WAIT_INTERVAL", timedelta(seconds=0.05))
    store = f"{TCP}{LOOPBACK}:{free_port(LOOPBACK)}"
    with ThreadPoolExecutor(2) as both:
        return list(both.map(lambda rank: BroadcastLink(store, rank=rank, size=2), range(2)))


def test_all_arrives_over_the_network(pair):
    first, second = pair
    sent = some([[3, 4], [5]], [torch.float32, torch.bfloat16])
    arrived = empty(sent)
    sends = threading.Timer(0.3, first.send, [sent])  # after a few looks in vain
    sends.start()
    second.receive(arrived)
    sends.join()
    assert all(torch.equal(sent[name], arrived[name]) for name in sent)


def test_whoever_is_told_to_leave_waits_no_longer(pair):
    first, second = pair
    tells = threading.Timer(0.3, second.leave)
    tells.start()
    with pytest.raises(GroupLostError, match="timed out"):
        second.receive({"w": torch.zeros(3)})
    tells.join()
    first.send({"w": torch.zeros(3)})  # what it waited for is over, and both can be closed


def test_a_meeting_that_nobody_comes_to_is_over_soon(monkeypatch):
    monkeypatch.setattr(weight_links, "local_address", lambda **_: LOOPBACK)
    monkeypatch.setattr(weight_links, "CONNECT_TIMEOUT", timedelta(seconds=0.3))
    store = f"{TCP}{LOOPBACK}:{free_port(LOOPBACK)}"
    with pytest.raises(GroupLostError):
        open_link(store, {}, rank=0, size=2)
