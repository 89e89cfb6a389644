"""Recommends a setting with a reason, or reports that none is better than the baseline."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from klinic.lab.ablation.intervals import (
    Difference,
    Interval,
    correct_by_holm,
    grid_step,
    mean_interval,
    paired_difference,
)
from klinic.lab.ablation.measures import MEASURES, SCORE

Result = Mapping[str, Any]
"""The measures of a trial, with its `setting` and `seed`."""

COMPARED = ("accuracy", "reward", "retention", "kl_token", SCORE.name)
SHORT_KEYS = {"kl.coef": "beta"}  # its name in papers


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
class Verdict:
    """The recommended setting, or None, and the explanation."""

    best: str | None
    says: str


def setting_rows(
    results: Sequence[Result], settings: Sequence[str], baseline: str
) -> list[SettingRow]:
    """Return a row for each setting with results, in order, with corrected p-values."""
    scored = add_scores(results)
    grids = {m.name: grid_step(_present_values(scored, m.name)) for m in (*MEASURES, SCORE)}
    table = []
    for setting in settings:
        own = [result for result in scored if result["setting"] == setting]
        if own:
            table.append(
                SettingRow(
                    setting=setting,
                    seeds=tuple(result["seed"] for result in own),
                    means={
                        m.name: mean_interval(_present_values(own, m.name), grid=grids[m.name])
                        for m in (*MEASURES, SCORE)
                    },
                    differences={}
                    if setting == baseline
                    else {n: measure_difference(scored, setting, baseline, n) for n in COMPARED},
                )
            )
    return correct_p_values(table)


def measure_difference(
    results: Sequence[Result], setting: str, other: str, name: str
) -> Difference:
    """Return the difference of a measure between two settings, paired by seed."""
    first, second = (_by_seed(results, which, name) for which in (setting, other))
    both = sorted(first.keys() & second.keys())
    grid = grid_step(_present_values(results, name))
    return paired_difference(
        [first[seed] for seed in both], [second[seed] for seed in both], grid=grid
    )


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
    return sum(not math.isnan(d.p_value) for row in table for d in row.differences.values())


def recommend_setting(table: Sequence[SettingRow], skill: str) -> Verdict:
    """Recommend the highest setting that is significantly better than the baseline, if any is.

    Only the baseline is compared with: of settings that are all better, the seeds rank none.
    """
    has_retention = any(SCORE.name in r.means and r.means[SCORE.name].num for r in table)
    ranked_by = SCORE.name if has_retention else skill
    what = f"mean of {skill} and retention" if has_retention else skill
    measured = [row for row in table if not math.isnan(row.means[ranked_by].mean)]
    baseline = next((row.setting for row in measured if not row.differences), None)
    if len(measured) < 2 or baseline is None:
        return Verdict(best=None, says="There are fewer than two settings to compare.")
    highest_first = sorted(measured, key=lambda row: -row.means[ranked_by].mean)
    compared = [(r.setting, r.differences[ranked_by]) for r in highest_first if r.differences]
    better = [name for name, gap in compared if gap.is_significant and gap.mean > 0]
    worse = [name for name, gap in compared if gap.is_significant and gap.mean < 0]
    close = [name for name, gap in compared if not gap.is_significant]
    if not num_tests(table):
        return Verdict(best=None, says="One seed tests nothing: run more to compare settings.")
    tested = f"{_num_seeds(measured)}, corrected for {num_tests(table)} tests"
    if better:
        says = f"Use {better[0]}: its {what} is higher than that of {baseline} ({tested})."
    else:
        says = f"Keep {baseline}: no other setting has a significantly higher {what} ({tested})."
    says += _list_settings("Also higher, and not compared with it", better[1:])
    says += _list_settings("Lower", worse) + _list_settings("No significant difference", close)
    return Verdict(best=better[0] if better else None, says=says)


def correct_p_values(table: Sequence[SettingRow]) -> list[SettingRow]:
    """Return the rows with the p-values of all their differences corrected together."""
    tests = [
        (row.setting, name)
        for row in table
        for name, difference in row.differences.items()
        if not math.isnan(difference.p_value)
    ]
    by_setting = {row.setting: row.differences for row in table}
    p_values = [by_setting[setting][name].p_value for setting, name in tests]
    corrected = dict(zip(tests, correct_by_holm(p_values), strict=True))
    return [
        replace(
            row,
            differences={
                name: replace(d, p_corrected=corrected.get((row.setting, name), math.nan))
                for name, d in row.differences.items()
            },
        )
        for row in table
    ]


def summary_lines(table: Sequence[SettingRow], verdict: Verdict) -> list[str]:
    """Return one summary line per setting."""
    marks = ("  <- best" if row.setting == verdict.best else "" for row in table)
    return [
        f"{_short_name(row.setting)}: {_format_figures(row)}{mark}"
        for row, mark in zip(table, marks, strict=True)
    ]


def pareto_front(table: Sequence[SettingRow], learnt: str) -> list[SettingRow]:
    """Return the Pareto front of trained skill and retention."""

    def coordinates(row: SettingRow) -> tuple[float, float]:
        return row.means[learnt].mean, row.means["retention"].mean

    measured_rows = [row for row in table if not any(map(math.isnan, coordinates(row)))]
    return [
        row
        for row in measured_rows
        if not any(
            coordinates(other) != coordinates(row)
            and all(a >= b for a, b in zip(coordinates(other), coordinates(row), strict=True))
            for other in measured_rows
        )
    ]


def _list_settings(label: str, names: Sequence[str]) -> str:
    return f" {label}: {', '.join(names)}." if names else ""


def _short_name(setting: str) -> str:
    pairs = (pair.partition("=") for pair in setting.split(" "))
    return " ".join(f"{SHORT_KEYS.get(key, key)}={value}" for key, _, value in pairs)


def _format_figures(row: SettingRow) -> str:
    accuracy, retention = row.means["accuracy"], row.means["retention"]
    parts = [
        f"Acc={accuracy.mean:.3f}{_format_spread(accuracy)}",
        f"KL={row.means['kl_token'].mean:.4f}",
    ]
    reward = row.means["reward"]
    if not math.isnan(reward.mean) and reward.mean != accuracy.mean:
        parts.insert(1, f"Reward={reward.mean:.3f}" + _format_spread(reward))
    if not math.isnan(retention.mean):
        parts.append(f"SFT_retention={retention.mean:.3f}")
    return ", ".join(parts)


def _format_spread(value: Interval) -> str:
    return "" if math.isnan(value.half_width) else f"+-{value.half_width:.3f}"


def _present_values(results: Sequence[Result], name: str) -> list[float]:
    return [result[name] for result in results if result.get(name) is not None]


def _by_seed(results: Sequence[Result], setting: str, name: str) -> dict[int, float]:
    own = (result for result in results if result["setting"] == setting)
    return {r["seed"]: r[name] for r in own if r.get(name) is not None}


def _has_retention(results: Sequence[Result]) -> bool:
    return all(result.get("retention") is not None for result in results)


def _num_seeds(table: Sequence[SettingRow]) -> str:
    num = len({seed for row in table for seed in row.seeds})
    return "1 seed" if num == 1 else f"{num} seeds"
