"""The faults that the demo offers, with their descriptions. Imports no torch."""

from collections.abc import Mapping

from klinic.checks import CHECKS

EXCLUDED: Mapping[str, str] = {
    "routing-mismatch": "it needs a mixture of experts, and no built-in model is one",
    # measured: it took two minutes, and the doctor named `step-too-big` first
    "reward-hacking": "it needs a well-trained policy and many steps",
}
"""Causes that a short run of a tiny model cannot show, with the reason."""

DEMO_FAULTS: Mapping[str, str] = {
    check.name: check.description for check in CHECKS if check.name not in EXCLUDED
}
"""Descriptions by cause, the most frequent causes first."""
