"""Compares settings with the baseline and recommends one, or reports that none is better."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from klinic.lab.ablation.equivalence import correct_jointly, decide, outside_margin_p_value
from klinic.lab.ablation.intervals import (
    Difference,
    Interval,
    grid_step,
    mean_interval,
    paired_difference,
)
from klinic.lab.ablation.measures import MEASURES, SCORE
from klinic.lab.ablation.power import smallest_difference
from klinic.lab.ablation.starts import (
    TrialKey,
    grid_divisor,
    independent_values,
    trial_key,
)

Result = Mapping[str, Any]
"""The measures of a trial, with its `setting` and `seed`."""

LOWER_IS_BETTER = ("kl_token",)
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
class Question:
    """What is tested: the declared outcome, and the margin within which it counts as equal."""

    outcome: str | None = None
    """The only tested measure; None: all of COMPARED, and the score decides."""
    margin: float | None = None


ALL_MEASURES = Question()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The recommended setting, or None, and the explanation."""

    best: str | None
    says: str
    decisions: dict[str, str] = field(default_factory=dict)
    """Better, worse, equivalent or undecided, by setting."""


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


def recommend_setting(
    table: Sequence[SettingRow], skill: str, question: Question = ALL_MEASURES, sample: str = ""
) -> Verdict:
    """Recommend the highest setting that is significantly better than the baseline, if any is.

    Only the baseline is compared with: of settings that are all better, the seeds rank none.
    """
    has_retention = any(SCORE.name in r.means and r.means[SCORE.name].num for r in table)
    ranked_by = question.outcome or (SCORE.name if has_retention else skill)
    what = f"mean of {skill} and retention" if ranked_by == SCORE.name else ranked_by
    measured = [row for row in table if not math.isnan(row.means[ranked_by].mean)]
    baseline = next((row.setting for row in measured if not row.differences), None)
    if len(measured) < 2 or baseline is None:
        return Verdict(best=None, says="There are fewer than two settings to compare.")
    if not num_tests(table):
        return Verdict(best=None, says="One seed tests nothing: run more to compare settings.")
    rising = ranked_by not in LOWER_IS_BETTER
    best_first = sorted(measured, key=lambda r: r.means[ranked_by].mean, reverse=rising)
    compared = {r.setting: r.differences[ranked_by] for r in best_first if r.differences}
    decisions = {name: decide(gap, higher_is_better=rising) for name, gap in compared.items()}
    better, worse, equal, still_open = (
        [name for name, decision in decisions.items() if decision == word]
        for word in ("better", "worse", "equivalent", "undecided")
    )
    tested = f"{sample or _num_seeds(measured)}, corrected for {num_tests(table)} tests"
    order = "higher" if rising else "lower"
    if better:
        says = f"Use {better[0]}: its {what} is {order} than that of {baseline} ({tested})."
    else:
        says = f"Keep {baseline}: no other setting has a significantly {order} {what} ({tested})."
    says += _list_settings(f"Also {order}, and not compared with it", better[1:])
    says += _list_settings("Lower" if rising else "Higher", worse)
    says += _list_settings(f"Equivalent within {question.margin}", equal)
    says += _list_settings("Undecided at this power", still_open)
    says += _describe_power([compared[name] for name in still_open], num_tests(table))
    return Verdict(best=better[0] if better else None, says=says, decisions=dict(decisions))


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


def _describe_power(open_differences: Sequence[Difference], num_tests: int) -> str:
    """State the difference that these values would have found, at the largest of their spreads."""
    widest = max(
        (d for d in open_differences if d.standard_error > 0),
        key=lambda d: d.standard_error,
        default=None,
    )
    if widest is None:
        return ""
    found = smallest_difference(
        spread=widest.standard_error * math.sqrt(widest.num), num=widest.num, level=0.05 / num_tests
    )
    return f" These runs find a difference of {found:.2g} in 80% of cases, not smaller ones."


def _has_retention(results: Sequence[Result]) -> bool:
    return all(result.get("retention") is not None for result in results)


def _num_seeds(table: Sequence[SettingRow]) -> str:
    num = len({seed for row in table for seed in row.seeds})
    return "1 seed" if num == 1 else f"{num} seeds"
