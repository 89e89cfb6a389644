"""Recommends a setting from its comparison with the baseline, or reports that none is better."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from klinic.lab.ablation.comparison import (
    ALL_MEASURES,
    LOWER_IS_BETTER,
    Question,
    SettingRow,
    num_tests,
)
from klinic.lab.ablation.equivalence import decide
from klinic.lab.ablation.intervals import Difference, Interval
from klinic.lab.ablation.measures import SCORE
from klinic.lab.ablation.power import smallest_difference

SHORT_KEYS = {"kl.coef": "beta"}  # its name in papers


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The recommended setting, or None, and the explanation."""

    best: str | None
    says: str
    decisions: dict[str, str] = field(default_factory=dict)
    """Better, worse, equivalent or undecided, by setting."""


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


def _num_seeds(table: Sequence[SettingRow]) -> str:
    num = len({seed for row in table for seed in row.seeds})
    return "1 seed" if num == 1 else f"{num} seeds"
