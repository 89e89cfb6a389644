"""The seeds that a study needs, from the spread of paired differences in a pilot.

The spread is pooled over the pilot's settings, each against the baseline. Settings share the
baseline's runs, so their differences are not independent and the degrees of freedom are those of
one setting.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from klinic.errors import ConfigError
from klinic.lab.ablation.comparison import (
    COMPARED,
    Question,
    Result,
    add_scores,
    measure_difference,
)
from klinic.lab.ablation.power import LEVEL, num_for_equivalence, num_needed, spread_limit
from klinic.lab.ablation.results import TRIALS


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerRow:
    """How many seeds show a difference of a measure with a power of 80%."""

    measure: str
    spread: float
    """Standard deviation of paired differences between seeds, pooled over settings."""
    limit: float
    """Upper limit of the spread, with a confidence of 80%."""
    num: int | None
    """Seeds needed at the spread; None beyond 10,000."""
    num_at_limit: int | None
    num_for_equivalence: int | None
    """Seeds that find equals equivalent, at the limit; None without a margin."""


def read_pilot(folder: Path) -> list[Result]:
    """Return the trials in a folder that `klinic ablate` wrote."""
    path = folder / TRIALS
    if not path.is_file():
        raise ConfigError(f"{folder} has no {TRIALS}. Give the folder of a finished ablation.")
    return list(pq.read_table(path).to_pylist())


def power_rows(
    results: Sequence[Result], baseline: str | None, detect: float, question: Question
) -> list[PowerRow]:
    """Return the seeds needed for each measure, corrected for one test a setting (Bonferroni)."""
    scored = add_scores(results)
    settings = list(dict.fromkeys(result["setting"] for result in scored))
    against = baseline or settings[0]
    if against not in settings:
        raise ConfigError(f"--baseline {against} is not a setting of {', '.join(settings)}.")
    others = [setting for setting in settings if setting != against]
    rows = []
    for measure in (question.outcome,) if question.outcome else COMPARED:
        found = pooled_spread(scored, others, against, measure)
        if found is not None:
            rows.append(_power_row(measure, found, detect, question.margin, LEVEL / len(others)))
    if not rows:
        raise ConfigError("the pilot has no two settings with two common seeds of this measure.")
    return rows


def pooled_spread(
    results: Sequence[Result], settings: Sequence[str], baseline: str, measure: str
) -> tuple[float, int] | None:
    """Return the pooled standard deviation of paired differences, with its degrees of freedom."""
    differences = [measure_difference(results, s, baseline, measure) for s in settings]
    known = [d for d in differences if d.num > 1]
    total = sum(d.num - 1 for d in known)
    squares = sum((d.num - 1) * d.num * d.standard_error**2 for d in known)
    if not squares:
        return None
    return math.sqrt(squares / total), min(d.num - 1 for d in known)


def _power_row(
    measure: str, found: tuple[float, int], detect: float, margin: float | None, level: float
) -> PowerRow:
    spread, degrees = found
    limit = spread_limit(spread, degrees)
    return PowerRow(
        measure=measure,
        spread=spread,
        limit=limit,
        num=num_needed(detect, spread=spread, level=level),
        num_at_limit=num_needed(detect, spread=limit, level=level),
        num_for_equivalence=None
        if margin is None
        else num_for_equivalence(margin, spread=limit, level=level),
    )
