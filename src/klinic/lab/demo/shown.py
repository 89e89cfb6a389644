"""Which faults the demo can show, each with the sentence of its cause. It needs no torch."""

from collections.abc import Mapping

from klinic.evidence.causes import CAUSES

LEFT_OUT: Mapping[str, str] = {
    "routing-mismatch": "no built-in model is a mixture of experts",
    # tried: two minutes of computing, and `step-too-big` was named first
    "reward-hacking": "it takes a policy that answers well first, and many steps to spoil it",
}
"""Causes that cannot be shown in a short run of a tiny model, and why."""

SHOWN: Mapping[str, str] = {
    cause.name: cause.description for cause in CAUSES if cause.name not in LEFT_OUT
}
"""What is broken, by name, in the order of how often each ruins a run."""
