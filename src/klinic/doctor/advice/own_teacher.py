"""Fixes for a teacher that a user added to a trainer without one."""

from collections.abc import Mapping


def teacher_steps(place: str) -> Mapping[str, tuple[str, ...]]:
    """Return the steps for the causes of a teacher; `place` is where a user would have added it."""
    where = f"In {place} that adds a teacher, "
    return {
        "stale-teacher-prompts": (
            f"{where}score the prompts and completions of this step, not those of an earlier "
            "batch.",
        ),
        "swapped-teacher": (
            f"{where}load the teacher by a fixed revision, and never from the folder that training "
            "saves to.",
        ),
        "teacher-as-reference": (
            f"{where}keep two models: the policy's start for the reference, the teacher for the "
            "other term.",
        ),
        "teacher-gradient-wrong": (
            f"{where}score the teacher under `torch.no_grad()`, and keep the gradient of the "
            "policy's log-probs.",
        ),
        "wrong-tokenizer": (
            f"{where}compare the ids of the vocabulary: a teacher of another tokenizer reads other "
            "words.",
        ),
    }
