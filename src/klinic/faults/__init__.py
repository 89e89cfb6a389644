"""Injected faults: one mechanism, one file; for the scoreboard and the demo."""

from klinic.faults import advantage_explodes
from klinic.faults.base import Fault, Severity

FAULTS: tuple[Fault, ...] = (advantage_explodes.FAULT,)

__all__ = ["FAULTS", "Fault", "Severity"]
