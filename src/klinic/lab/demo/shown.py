"""The faults that the demo offers, with their descriptions. Imports no torch."""

from collections.abc import Mapping

from klinic.evidence.causes import CAUSES

LEFT_OUT: Mapping[str, str] = {
    "routing-mismatch": "it needs a mixture of experts, and no built-in model is one",
    # measured: it took two minutes, and the doctor named `step-too-big` first
    "reward-hacking": "it needs a well-trained policy and many steps",
}
"""Causes that a short run of a tiny model cannot show, with the reason."""

SHOWN: Mapping[str, str] = {
    cause.name: cause.description for cause in CAUSES if cause.name not in LEFT_OUT
}
"""Descriptions by cause, the most frequent causes first."""
