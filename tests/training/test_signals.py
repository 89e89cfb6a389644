"""One signal asks, a second one does not wait, and an echo of the first is no second one."""

import os
import signal

import pytest

from klinic.training import signals
from klinic.training.signals import StopSignal


def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def test_the_first_asks_and_its_echo_asks_nothing_more():
    with StopSignal() as asked:
        assert not asked.is_requested
        send()
        send()
        assert asked.signal == signal.SIGTERM


def test_a_second_one_does_not_wait(monkeypatch):
    monkeypatch.setattr(signals, "DUPLICATE_WINDOW", 0.0)
    with StopSignal():
        send()
        with pytest.raises(KeyboardInterrupt):
            send()


def test_another_signal_is_no_echo():
    with StopSignal() as asked:
        send()
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert asked.signal == signal.SIGTERM
