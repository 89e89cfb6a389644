"""Recommends a setting with a reason, or reports that the seeds do not separate the settings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klinic.lab.ablation.intervals import Interval, bootstrap_interval, paired_difference
from klinic.lab.ablation.measures import MEASURES

Result = Mapping[str, Any]
"""The measures of a trial, with its `setting` and `seed`."""

COMPARED = ("accuracy", "reward", "retention", "kl_token")
SHORT_KEYS = {"kl.coef": "beta"}  # its name in papers


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """The measures of a setting over its seeds."""

    setting: str
    seeds: tuple[int, ...]
    means: dict[str, Interval]
    """Means by measure, with bootstrap intervals."""
    differences: dict[str, Interval]
    """Differences to the baseline over common seeds; empty for the baseline itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The recommended setting, or None, and the explanation."""

    best: str | None
    says: str


def setting_rows(
    results: Sequence[Result], settings: Sequence[str], baseline: str
) -> list[SettingRow]:
    """Return a row for each setting with results, in order."""
    table = []
    for setting in settings:
        own = [result for result in results if result["setting"] == setting]
        if own:
            table.append(
                SettingRow(
                    setting=setting,
                    seeds=tuple(result["seed"] for result in own),
                    means={
                        m.name: bootstrap_interval(_present_values(own, m.name)) for m in MEASURES
                    },
                    differences={}
                    if setting == baseline
                    else {n: measure_difference(results, setting, baseline, n) for n in COMPARED},
                )
            )
    return table


def measure_difference(results: Sequence[Result], setting: str, other: str, name: str) -> Interval:
    """Return the difference of a measure between two settings, paired by seed."""
    first, second = (_by_seed(results, which, name) for which in (setting, other))
    both = sorted(first.keys() & second.keys())
    return paired_difference([first[seed] for seed in both], [second[seed] for seed in both])


def add_scores(results: Sequence[Result]) -> list[Result]:
    """Add the `score` by which settings are ranked.

    It is the mean of the trained skill and retention, or the trained skill alone if retention is
    not measured.
    """
    has_retention, skill_measure = _has_retention(results), skill_measure_name(results)
    return [
        {
            **r,
            "score": (r[skill_measure] + r["retention"]) / 2 if has_retention else r[skill_measure],
        }
        for r in results
        if r.get(skill_measure) is not None
    ]


def skill_measure_name(results: Sequence[Result]) -> str:
    """Return the measure of the trained skill: the recipe's reward if measured, else accuracy."""
    return "reward" if results and all(r.get("reward") is not None for r in results) else "accuracy"


def recommend_setting(results: Sequence[Result], settings: Sequence[str]) -> Verdict:
    """Recommend the setting with the highest score if it beats any other beyond noise."""
    scored_results = add_scores(results)
    means = {
        s: _mean_or_nan([r["score"] for r in scored_results if r["setting"] == s]) for s in settings
    }
    finite_means = {setting: value for setting, value in means.items() if not math.isnan(value)}
    if len(finite_means) < 2:
        return Verdict(best=None, says="There are fewer than two settings to compare.")
    best = max(finite_means, key=finite_means.__getitem__)
    lead = {
        s: measure_difference(scored_results, best, s, "score") for s in finite_means if s != best
    }
    beaten = [setting for setting, interval in lead.items() if interval.low > 0]
    close = [setting for setting in lead if setting not in beaten]
    what = skill_measure_name(results) + (" and retention" if _has_retention(results) else "")
    if not beaten:
        return Verdict(
            best=None,
            says=f"No significant difference: {best} has the highest {what}, but its lead over "
            f"each other setting is within the noise of {_num_seeds(scored_results)}. "
            "Run more seeds, or use the simplest setting.",
        )
    together = " taken together" if _has_retention(results) else ""
    says = f"Use {best}: the highest {what}{together}, beyond the noise of "
    says += f"{_num_seeds(scored_results)} above {', '.join(beaten)}"
    if close:
        says += f". Within noise of {', '.join(close)}"
    return Verdict(best=best, says=says + ".")


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


def _num_seeds(results: Sequence[Result]) -> str:
    num = len({result["seed"] for result in results})
    return "1 seed" if num == 1 else f"{num} seeds"


def _mean_or_nan(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
