"""Recommends a setting with a reason, or reports that the seeds do not separate the settings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from klinic.lab.ablation.intervals import Interval, bootstrap, paired
from klinic.lab.ablation.measures import MEASURES

Result = Mapping[str, Any]
"""The measures of a trial, with its `setting` and `seed`."""

COMPARED = ("accuracy", "reward", "retention", "kl_token")
SHORT = {"kl.coef": "beta"}  # its name in papers


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
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


def rows(results: Sequence[Result], settings: Sequence[str], baseline: str) -> list[Row]:
    """Return a row for each setting with results, in order."""
    found = []
    for setting in settings:
        own = [result for result in results if result["setting"] == setting]
        if own:
            found.append(
                Row(
                    setting=setting,
                    seeds=tuple(result["seed"] for result in own),
                    means={m.name: bootstrap(_known(own, m.name)) for m in MEASURES},
                    differences={}
                    if setting == baseline
                    else {n: difference(results, setting, baseline, n) for n in COMPARED},
                )
            )
    return found


def difference(results: Sequence[Result], setting: str, other: str, name: str) -> Interval:
    """Return the difference of a measure between two settings, paired by seed."""
    first, second = (_by_seed(results, which, name) for which in (setting, other))
    both = sorted(first.keys() & second.keys())
    return paired([first[seed] for seed in both], [second[seed] for seed in both])


def scored(results: Sequence[Result]) -> list[Result]:
    """Add the `score` by which settings are ranked.

    It is the mean of the trained skill and retention, or the trained skill alone if retention is
    not measured.
    """
    kept, learnt = _has_retention(results), learnt_by(results)
    return [
        {**r, "score": (r[learnt] + r["retention"]) / 2 if kept else r[learnt]}
        for r in results
        if r.get(learnt) is not None
    ]


def learnt_by(results: Sequence[Result]) -> str:
    """Return the measure of the trained skill: the recipe's reward if measured, else accuracy."""
    return "reward" if results and all(r.get("reward") is not None for r in results) else "accuracy"


def recommend(results: Sequence[Result], settings: Sequence[str]) -> Verdict:
    """Recommend the setting with the highest score if it beats any other beyond noise."""
    judged = scored(results)
    means = {s: _mean([r["score"] for r in judged if r["setting"] == s]) for s in settings}
    known = {setting: value for setting, value in means.items() if not math.isnan(value)}
    if len(known) < 2:
        return Verdict(best=None, says="There are fewer than two settings to compare.")
    best = max(known, key=known.__getitem__)
    lead = {s: difference(judged, best, s, "score") for s in known if s != best}
    beaten = [setting for setting, interval in lead.items() if interval.low > 0]
    close = [setting for setting in lead if setting not in beaten]
    what = learnt_by(results) + (" and retention" if _has_retention(results) else "")
    if not beaten:
        return Verdict(
            best=None,
            says=f"No significant difference: {best} has the highest {what}, but its lead over "
            f"each other setting is within the noise of {_num_seeds(judged)}. "
            "Run more seeds, or use the simplest setting.",
        )
    together = " taken together" if _has_retention(results) else ""
    says = f"Use {best}: the highest {what}{together}, beyond the noise of "
    says += f"{_num_seeds(judged)} above {', '.join(beaten)}"
    if close:
        says += f". Within noise of {', '.join(close)}"
    return Verdict(best=best, says=says + ".")


def closing_lines(table: Sequence[Row], verdict: Verdict) -> list[str]:
    """Return one summary line per setting."""
    marks = ("  <- best" if row.setting == verdict.best else "" for row in table)
    return [
        f"{_short(row.setting)}: {_figures(row)}{mark}"
        for row, mark in zip(table, marks, strict=True)
    ]


def pareto(table: Sequence[Row], learnt: str) -> list[Row]:
    """Return the Pareto front of trained skill and retention."""

    def at(row: Row) -> tuple[float, float]:
        return row.means[learnt].mean, row.means["retention"].mean

    known = [row for row in table if not any(map(math.isnan, at(row)))]
    return [
        row
        for row in known
        if not any(
            at(other) != at(row) and all(a >= b for a, b in zip(at(other), at(row), strict=True))
            for other in known
        )
    ]


def _short(setting: str) -> str:
    pairs = (pair.partition("=") for pair in setting.split(" "))
    return " ".join(f"{SHORT.get(key, key)}={value}" for key, _, value in pairs)


def _figures(row: Row) -> str:
    accuracy, kept = row.means["accuracy"], row.means["retention"]
    parts = [f"Acc={accuracy.mean:.3f}{_spread(accuracy)}", f"KL={row.means['kl_token'].mean:.4f}"]
    reward = row.means["reward"]
    if not math.isnan(reward.mean) and reward.mean != accuracy.mean:
        parts.insert(1, f"Reward={reward.mean:.3f}" + _spread(reward))
    if not math.isnan(kept.mean):
        parts.append(f"SFT_retention={kept.mean:.3f}")
    return ", ".join(parts)


def _spread(value: Interval) -> str:
    return "" if math.isnan(value.half) else f"+-{value.half:.3f}"


def _known(results: Sequence[Result], name: str) -> list[float]:
    return [result[name] for result in results if result.get(name) is not None]


def _by_seed(results: Sequence[Result], setting: str, name: str) -> dict[int, float]:
    own = (result for result in results if result["setting"] == setting)
    return {r["seed"]: r[name] for r in own if r.get(name) is not None}


def _has_retention(results: Sequence[Result]) -> bool:
    return all(result.get("retention") is not None for result in results)


def _num_seeds(results: Sequence[Result]) -> str:
    num = len({result["seed"] for result in results})
    return "1 seed" if num == 1 else f"{num} seeds"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
