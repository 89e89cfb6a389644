"""Weights over gloo arrive as they were sent; no end waits for ever."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from klinic.cluster.sampler_worker import HostReceiver
from klinic.cluster.session import free_port
from klinic.model.tensor_prints import describe_damage
from klinic.model.weight_stream import WeightStream
from klinic.sampler import weight_group
from klinic.sampler.weight_group import LOOPBACK, TCP, GroupLostError, WeightGroup
from klinic.sampler.weight_sender import WeightSender

SHAPES = {"a": (7, 3), "b": (5,), "c": (2, 2, 2)}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(weight_group, "WAIT_INTERVAL", timedelta(seconds=0.05))
    monkeypatch.setattr(weight_group, "PIECE_BYTES", 40)


def weights(seed=0):
    stream = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=stream) for name, shape in SHAPES.items()}


class TwoReceivers:
    """Two receivers behind one control, each in a thread; `lose` makes one raise in an update."""

    num_workers = 2

    def __init__(self, dtype, *, lose=None):
        self.tensors = [
            {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
            for _ in range(2)
        ]
        self.receivers = [HostReceiver(tensors) for tensors in self.tensors]
        self.lose, self.versions = lose, []

    def _both(self, name, *arguments):
        with ThreadPoolExecutor(2) as both:
            work = [both.submit(getattr(r, name), *arguments) for r in self.receivers]
            return [one.result() for one in work]

    def init_weight_transfer_engine(self, init_info):
        with ThreadPoolExecutor(2) as both:
            infos = [{**init_info, "host": LOOPBACK, "first_rank": rank} for rank in (1, 2)]
            join = [r.init_weight_transfer_engine for r in self.receivers]
            list(both.map(lambda f, info: f(info), join, infos))

    def start_weight_update(self):
        self._both("start_weight_update")

    def update_weights(self, update_info):
        if self.lose is not None:
            raise self.lose
        self._both("update_weights", update_info)

    def finish_weight_update(self, weight_version=None):
        self.versions.append(weight_version)

    def received_weights(self):
        return [prints for receiver in self.receivers for prints in receiver.received_weights()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("store", ["file", "tcp"])
def test_all_receivers_get_what_was_sent(tmp_path, dtype, store):
    address = str(tmp_path / "store")
    if store == "tcp":
        address = f"{TCP}{LOOPBACK}:{free_port(LOOPBACK)}"
    control = TwoReceivers(dtype)
    sender = WeightSender(control, address)
    for seed in (1, 2):  # it is used many times
        stream = WeightStream(weights(seed), dtype=dtype, bucket_bytes=64)
        sender.send(stream, f"version {seed}")
        for tensors in control.tensors:
            assert all(torch.equal(tensors[n], p.to(dtype)) for n, p in weights(seed).items())
        assert describe_damage(stream.fingerprints, control.received_weights()) == ""
    assert control.versions == ["version 1", "version 2"]
    sender.close()


def test_the_reason_of_a_receiver_is_raised_and_nobody_waits_for_it(tmp_path):
    sender = WeightSender(TwoReceivers(torch.float32, lose=KeyError("gone")), str(tmp_path / "s"))
    with pytest.raises(KeyError, match="gone"):
        sender.send(WeightStream(weights(), dtype=torch.float32), "1")
    sender.close()


@pytest.fixture
def pair():
    """Both ends of a transfer, on this machine."""
    store = f"{TCP}{LOOPBACK}:{free_port(LOOPBACK)}"
    with ThreadPoolExecutor(2) as both:
        return list(both.map(lambda rank: WeightGroup(store, rank=rank, size=2), range(2)))


def test_a_receiver_waits_for_a_late_sender(pair):
    trainer, receiver = pair
    stream = WeightStream(weights(), dtype=torch.float32)
    sends = threading.Timer(0.3, lambda: [trainer.send(b, is_over=lambda: False) for b in stream])
    sends.start()  # after a few looks in vain
    arrived = {name: p for piece in receiver.receive(stream.plan) for name, p in piece.items()}
    sends.join()
    assert all(torch.equal(arrived[name], p) for name, p in weights().items())


def test_a_receiver_gives_up_once_the_group_is_abandoned(pair):
    trainer, receiver = pair
    stream = WeightStream({"a": weights()["a"]}, dtype=torch.float32)
    leaves = threading.Timer(0.3, trainer.abandon)
    leaves.start()
    with pytest.raises(GroupLostError, match="timed out"):
        list(receiver.receive(stream.plan))
    leaves.join()
    for bucket in stream:  # what it waited for is over, and both can be closed
        trainer.send(bucket, is_over=lambda: False)


def test_a_meeting_that_nobody_comes_to_is_over_soon():
    store = f"{TCP}{LOOPBACK}:{free_port(LOOPBACK)}"
    with pytest.raises(GroupLostError):
        WeightGroup(store, rank=0, size=2, timeout=timedelta(seconds=0.3))
