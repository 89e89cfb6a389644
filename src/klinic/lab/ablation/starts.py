"""Warm starts as a second factor: which values of trials are independent of one another.

Seeds of one start share its weights, so with several starts the independent values are the means
of starts: Student's t over them covers any noise between and within starts, and errs to the wide
side where starts differ in noise. With one start the seeds are the values, and every interval is
one of this start only.

Source: R. Ibragimov and U. Mueller, "t-Statistic Based Correlation and Heterogeneity Robust
Inference" (2010).
"""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

TrialKey = tuple[str, int]
"""The start of a trial and its seed; trials of two settings with equal keys are a pair."""


def trial_key(result: Mapping[str, Any]) -> TrialKey:
    """Return the start and seed of a trial."""
    return str(result.get("start") or ""), int(result["seed"])


def independent_values(values: Mapping[TrialKey, float]) -> list[float]:
    """Return the means of starts; the values themselves if there is one start.

    >>> independent_values({("a", 1): 0.25, ("a", 2): 0.75, ("b", 3): 0.5})
    [0.5, 0.5]
    >>> independent_values({("a", 1): 0.25, ("a", 2): 0.75})
    [0.25, 0.75]
    """
    by_start = _group_by_start(values)
    if len(by_start) == 1:
        return list(values.values())
    return [mean(own) for own in by_start.values()]


def grid_divisor(values: Mapping[TrialKey, float]) -> int:
    """Return by how much means of starts refine the grid of the values."""
    by_start = _group_by_start(values)
    return 1 if len(by_start) < 2 else max(map(len, by_start.values()))


def describe_sample(results: Sequence[Mapping[str, Any]]) -> str:
    """Describe starts and seeds of the trials.

    >>> describe_sample([{"seed": 1}, {"seed": 2}, {"seed": 1}])
    '2 seeds of one start'
    >>> describe_sample([{"start": "a", "seed": 1}, {"start": "b", "seed": 2}])
    '2 starts, 1 seed each'
    """
    keys = {trial_key(result) for result in results}
    by_start = _group_by_start(dict.fromkeys(keys, 0.0))
    sizes = sorted({len(own) for own in by_start.values()})
    most = sizes[-1] if sizes else 0
    seeds = f"{most} seed{'' if most == 1 else 's'}"
    if len(by_start) < 2:
        return f"{seeds} of one start"
    return f"{len(by_start)} starts, {'at most ' if len(sizes) > 1 else ''}{seeds} each"


def _group_by_start(values: Mapping[TrialKey, float]) -> dict[str, list[float]]:
    by_start: dict[str, list[float]] = {}
    for (start, _), value in values.items():
        by_start.setdefault(start, []).append(value)
    return by_start
