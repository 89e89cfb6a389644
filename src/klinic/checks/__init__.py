"""The catalogue: one cause, one file. To add one, write its file and name it here."""

from klinic.checks import advantage_explodes
from klinic.checks.base import Case, Check, Finding, Probe, Stage, Verdict

CHECKS: tuple[Check, ...] = (advantage_explodes.CHECK,)
"""In the order of `evidence.causes`."""

__all__ = ["CHECKS", "Case", "Check", "Finding", "Probe", "Stage", "Verdict"]
