"""Compares settings with the baseline: means, paired differences, tests corrected together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from klinic.lab.ablation.equivalence import correct_jointly, outside_margin_p_value
from klinic.lab.ablation.intervals import (
    Difference,
    Interval,
    grid_step,
    mean_interval,
    paired_difference,
)
from klinic.lab.ablation.measures import MEASURES, SCORE
from klinic.lab.ablation.starts import TrialKey, grid_divisor, independent_values, trial_key

Result = Mapping[str, Any]
"""The measures of a trial, with its `setting` and `seed`."""

LOWER_IS_BETTER = ("kl_token",)
COMPARED = ("accuracy", "reward", "retention", "kl_token", SCORE.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """The measures of a setting over its seeds."""

    setting: str
    seeds: tuple[int, ...]
    means: dict[str, Interval]
    """Means by measure, with 95% intervals by Student's t."""
    differences: dict[str, Difference]
    """Differences to the baseline over common seeds; empty for the baseline itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is tested: the declared outcome, and the margin within which it counts as equal."""

    outcome: str | None = None
    """The only tested measure; None: all of COMPARED, and the score decides."""
    margin: float | None = None


ALL_MEASURES = Question()


def setting_rows(
    results: Sequence[Result],
    settings: Sequence[str],
    baseline: str,
    question: Question = ALL_MEASURES,
) -> list[SettingRow]:
    """Return a row for each setting with results, in order, with corrected p-values."""
    scored = add_scores(results)
    decisive = question.outcome or ranking_measure(scored)
    table = []
    for setting in settings:
        own = [result for result in scored if result["setting"] == setting]
        if own:
            table.append(
                SettingRow(
                    setting=setting,
                    seeds=tuple(result["seed"] for result in own),
                    means={
                        m.name: _measure_mean(scored, setting, m.name) for m in (*MEASURES, SCORE)
                    },
                    differences={}
                    if setting == baseline
                    else {
                        n: _select_tests(
                            measure_difference(scored, setting, baseline, n),
                            question,
                            is_decisive=n == decisive,
                        )
                        for n in COMPARED
                    },
                )
            )
    return correct_p_values(table)


def measure_difference(
    results: Sequence[Result], setting: str, other: str, name: str
) -> Difference:
    """Return the difference of a measure between two settings, paired by start and seed."""
    first, second = (_by_trial(results, which, name) for which in (setting, other))
    differences = {key: first[key] - second[key] for key in sorted(first.keys() & second.keys())}
    grid = grid_step(_present_values(results, name)) / grid_divisor(differences)
    values = independent_values(differences)
    return paired_difference(values, [0.0] * len(values), grid=grid)


def ranking_measure(results: Sequence[Result]) -> str:
    """Return the measure by which settings are ranked unless another is declared."""
    return SCORE.name if _has_retention(results) else skill_measure_name(results)


def add_scores(results: Sequence[Result]) -> list[Result]:
    """Add the `score` by which settings are ranked: the mean of trained skill and retention.

    Without measured retention there is none, and the trained skill ranks.
    """
    if not _has_retention(results):
        return list(results)
    skill = skill_measure_name(results)
    return [
        {**r, SCORE.name: None if r.get(skill) is None else (r[skill] + r["retention"]) / 2}
        for r in results
    ]


def skill_measure_name(results: Sequence[Result]) -> str:
    """Return the measure of the trained skill: the recipe's reward if measured, else accuracy."""
    return "reward" if results and all(r.get("reward") is not None for r in results) else "accuracy"


def num_tests(table: Sequence[SettingRow]) -> int:
    """Return the number of tests that the p-values are corrected for."""
    return sum(
        not math.isnan(p_value)
        for row in table
        for difference in row.differences.values()
        for p_value in (difference.p_value, difference.p_outside)
    )


def correct_p_values(table: Sequence[SettingRow]) -> list[SettingRow]:
    """Return the rows with the p-values of all their tests corrected together."""
    compared = [
        (row.setting, name, difference)
        for row in table
        for name, difference in row.differences.items()
        if not math.isnan(difference.p_value)
    ]
    tests = [
        [d.p_value] if math.isnan(d.p_outside) else [d.p_value, d.p_outside] for _, _, d in compared
    ]
    corrected = {
        (setting, name): replace(
            difference, p_corrected=own[0], p_outside_corrected=own[1] if own[1:] else math.nan
        )
        for (setting, name, difference), own in zip(compared, correct_jointly(tests), strict=True)
    }
    return [
        replace(
            row,
            differences={n: corrected.get((row.setting, n), d) for n, d in row.differences.items()},
        )
        for row in table
    ]


def _present_values(results: Sequence[Result], name: str) -> list[float]:
    return [float(result[name]) for result in results if result.get(name) is not None]


def _by_trial(results: Sequence[Result], setting: str, name: str) -> dict[TrialKey, float]:
    own = (result for result in results if result["setting"] == setting)
    return {trial_key(r): float(r[name]) for r in own if r.get(name) is not None}


def _measure_mean(results: Sequence[Result], setting: str, name: str) -> Interval:
    values = _by_trial(results, setting, name)
    grid = grid_step(_present_values(results, name)) / grid_divisor(values)
    return mean_interval(independent_values(values), grid=grid)


def _select_tests(difference: Difference, question: Question, *, is_decisive: bool) -> Difference:
    """Return a difference with the tests that the question asks for."""
    if question.outcome is not None and not is_decisive:
        return replace(difference, p_value=math.nan, p_corrected=math.nan)
    if question.margin is None or not is_decisive:
        return difference
    return replace(difference, p_outside=outside_margin_p_value(difference, question.margin))


def _has_retention(results: Sequence[Result]) -> bool:
    return all(result.get("retention") is not None for result in results)
