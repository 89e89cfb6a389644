"""Shared formatting of trackers: metric names, and completions as a table of plain text."""

import math
from collections.abc import Sequence

from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Rollout

COMPLETION_COLUMNS = ("prompt", "completion", "ended by", "reward", "advantage")


def metric_tag(name: str) -> str:
    """Return the tag of a metric.

    >>> metric_tag("kl_penalty"), metric_tag("eval/accuracy")
    ('train/kl_penalty', 'eval/accuracy')
    """
    return name if name.startswith("eval/") else f"train/{name}"


def as_code_block(message: str) -> str:
    """Return untrusted text as a Markdown code block, so that it is shown literally.

    >>> print(as_code_block("a <b>"))
        a <b>
    """
    return f"    {' '.join(message.split())}"


def completion_rows(
    rollouts: Sequence[Rollout], record: StepRecord
) -> list[list[str | float | None]]:
    """Return one row per completion, under `COMPLETION_COLUMNS`; a missing reward is None."""
    reward = [None] * len(rollouts) if record.reward is None else record.reward.tolist()
    advantage = [None] * len(rollouts) if record.advantage is None else record.advantage.tolist()
    return [
        [
            r.prompt.text,
            r.text,
            r.finish_reason,
            _number_or_none(reward[i]),
            _number_or_none(advantage[i]),
        ]
        for i, r in enumerate(rollouts)
    ]


def _number_or_none(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
