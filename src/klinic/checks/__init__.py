"""The catalogue: one cause, one file. To add one, write its file and name it here."""

from klinic.checks import (
    advantage_explodes,
    misaligned_logp,
    stop_token_fault,
    temperature_on_one_side,
    wrong_groups,
    wrong_loss_mask,
)
from klinic.checks.base import Case, Check, Finding, Stage, Verdict

CHECKS: tuple[Check, ...] = (
    temperature_on_one_side.CHECK,
    misaligned_logp.CHECK,
    wrong_loss_mask.CHECK,
    stop_token_fault.CHECK,
    advantage_explodes.CHECK,
    wrong_groups.CHECK,
)
"""In the order of `evidence.causes`."""

__all__ = ["CHECKS", "Case", "Check", "Finding", "Stage", "Verdict"]
