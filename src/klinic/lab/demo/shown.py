"""The faults that the demo offers, with their descriptions. Imports no torch."""

from collections.abc import Mapping

from klinic.checks import CHECKS

EXCLUDED: Mapping[str, str] = {
    "policy-gradient-wrong": "its fault is one of TRL's loss",
    "ratio-not-applied": "klinic's own loop records every generation once; TRL records each update",
    "routing-mismatch": "it needs a mixture of experts, and no built-in model is one",
    "truncation-not-mirrored": "klinic's learner truncates as its sampler does",
    "gap-grows-with-position": "completions of the built-in tasks are short",
    "corrupted-sync": "the demo samples from the learner's own tensors",
    "misplaced-advantage": "klinic's loop has one advantage per completion",
    "ranks-diverge": "the demo runs in one process",
    **dict.fromkeys(
        (
            *("stale-teacher-prompts", "swapped-teacher", "teacher-as-reference"),
            *("teacher-gradient-wrong", "wrong-tokenizer"),
        ),
        "the demo has no teacher",
    ),
    "clip-range-wrong": "klinic clips around a ratio of 1 by itself",
    "entropy-term-wrong": "klinic's loss has no entropy bonus",
    "unexplained-gap": "a fault that is known has an explanation",
    # measured: it took two minutes, and the doctor named `step-too-big` first
    "reward-hacking": "it needs a well-trained policy and many steps",
}
"""Causes that a short run of a tiny model cannot show, with the reason."""

DEMO_FAULTS: Mapping[str, str] = {
    check.name: check.description for check in CHECKS if check.name not in EXCLUDED
}
"""Descriptions by cause, the most frequent causes first."""
