"""What trackers tell alike: the names of metrics, and completions as a table of plain text."""

import math
from collections.abc import Sequence

from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Rollout

COLUMNS = ("prompt", "completion", "ended by", "reward", "advantage")


def tag(name: str) -> str:
    """Return where a metric is found.

    >>> tag("kl_penalty"), tag("eval/accuracy")
    ('train/kl_penalty', 'eval/accuracy')
    """
    return name if name.startswith("eval/") else f"train/{name}"


def as_code(sentence: str) -> str:
    """Return text that a page of Markdown shows as it is: names in it are not ours.

    >>> print(as_code("a <b>"))
        a <b>
    """
    return f"    {' '.join(sentence.split())}"


def rows(rollouts: Sequence[Rollout], record: StepRecord) -> list[list[str | float | None]]:
    """Return a row a completion, under `COLUMNS`; a reward that is missing is none."""
    reward = [None] * len(rollouts) if record.reward is None else record.reward.tolist()
    advantage = [None] * len(rollouts) if record.advantage is None else record.advantage.tolist()
    return [
        [r.prompt.text, r.text, r.finish_reason, _known(reward[i]), _known(advantage[i])]
        for i, r in enumerate(rollouts)
    ]


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
