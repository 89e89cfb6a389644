"""The synthetic multi-hop task."""

from collections.abc import Mapping

from klinic.tasks.base import Task
from klinic.tasks.multihop import rewards
from klinic.tasks.multihop.answers import extract_answer, normalized_words
from klinic.tasks.multihop.synthetic import SKILLS, eval_rows, train_rows, warm_start_rows


def parse(row: Mapping[str, str], completion: str) -> str | None:  # noqa: ARG001 - the signature of Task.parse
    """Return the normalised answer of a completion, or None if its format is wrong."""
    if rewards.form.grade(completion).level != "whole":
        return None
    return " ".join(normalized_words(extract_answer(completion) or ""))


TASK = Task(
    name="multihop",
    skills=tuple(SKILLS),
    default_skill="two-hop",
    train_rows=train_rows,
    eval_rows=eval_rows,
    warm_start_rows=warm_start_rows,
    rewards={
        "exact": rewards.exact,
        "f1": rewards.f1,
        "form": rewards.form,
        "context_kept": rewards.context_kept,
    },
    default_reward="f1",
    parse=parse,
    measures=("exact", "f1", "form", "context_kept"),
)
