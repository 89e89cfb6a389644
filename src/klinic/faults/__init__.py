"""Injected faults: one mechanism, one file; for the scoreboard and the demo."""

from klinic.faults import (
    advantage_explodes,
    misaligned_logp,
    stop_token_fault,
    temperature_on_one_side,
    wrong_groups,
    wrong_loss_mask,
)
from klinic.faults.base import Fault, Severity

FAULTS: tuple[Fault, ...] = (
    temperature_on_one_side.FAULT,
    misaligned_logp.FAULT,
    wrong_loss_mask.FAULT,
    stop_token_fault.FAULT,
    advantage_explodes.FAULT,
    wrong_groups.FAULT,
)

__all__ = ["FAULTS", "Fault", "Severity"]
