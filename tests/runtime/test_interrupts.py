"""Ctrl-C that a library swallowed is raised again where klinic loops."""

import os
import signal
import sys

import pytest

from klinic.runtime import interrupts


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(interrupts, "_received", [False])
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def swallow_interrupt():
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_swallowed_interrupt_is_raised_again():
    interrupts.remember_interrupts()
    interrupts.raise_if_interrupted()
    swallow_interrupt()
    with pytest.raises(KeyboardInterrupt):
        interrupts.raise_if_interrupted()


def test_without_a_command_nothing_is_remembered():
    swallow_interrupt()
    interrupts.raise_if_interrupted()


def test_what_the_caller_ignores_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.remember_interrupts()
    os.kill(os.getpid(), signal.SIGINT)
    interrupts.raise_if_interrupted()


class Interrupted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


class Broken:
    def __del__(self):
        raise ValueError("mine")


def test_one_in_a_finalizer_is_not_printed_and_not_lost(capsys):
    interrupts.remember_interrupts()
    Interrupted()
    Broken()
    said = capsys.readouterr().err
    assert "KeyboardInterrupt" not in said
    assert "ValueError: mine" in said
    with pytest.raises(KeyboardInterrupt):
        interrupts.raise_if_interrupted()
