"""All results as one table: gains, and their difference with its interval over seeds."""

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from bench.trl_comparison.settings import UNEQUAL
from klinic.lab.ablation.intervals import mean_interval
from klinic.lab.ablation.page import format_difference

Result = dict[str, Any]
Pair = tuple[Result, Result]

HEAD = (
    "steps",
    "coef",
    "seeds",
    "gain of klinic",
    "gain of TRL",
    "klinic - TRL, 95% interval",
    "retention",
    "KL per token",
    "reward, first and last tenth",
    "seconds",
    "CPU seconds",
)


def page(results: Sequence[Result]) -> str:
    """Return the table and what must be known to read it, as Markdown."""
    pairs = paired(results)
    if not pairs:
        return "No pair of runs is done yet."
    first = pairs[0][0]
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    lines = [_row(HEAD), _row(["---"] * len(HEAD))]
    for steps, coef in sorted({(k["steps"], k["coef"]) for k, _ in pairs}):
        lines.append(
            _row(_cells([p for p in pairs if (p[0]["steps"], p[0]["coef"]) == (steps, coef)]))
        )
    return "\n".join(
        [
            *lines,
            "",
            f"Gain: greedy accuracy on {first['num_sums']} held-out sums, after - before, which "
            f"was {first['before']['addition']:.4f}. Cells with two numbers: klinic, TRL.",
            "Seconds are not a controlled timing: whatever else the machine did is in them.",
            f"Versions: {versions}.",
            "",
            "What is not equal:",
            *(f"- {line}" for line in UNEQUAL),
        ]
    )


def paired(results: Sequence[Result]) -> list[Pair]:
    """Return runs that differ in the trainer alone, refusing pairs that saw other prompts."""
    by_key = {(r["trainer"], r["steps"], r["coef"], r["seed"]): r for r in results}
    pairs = []
    for (trainer, *rest), result in by_key.items():
        other = by_key.get(("trl", *rest))
        if trainer == "klinic" and other is not None:
            for what in ("prompts", "before", "num_sums"):
                if result[what] != other[what]:
                    raise AssertionError(f"steps, coef, seed {rest}: {what} differ in the pair.")
            pairs.append((result, other))
    return pairs


def _cells(pairs: Sequence[Pair]) -> list[str]:
    first = pairs[0][0]
    difference = [k["gain"] - t["gain"] for k, t in pairs]
    return [
        str(first["steps"]),
        f"{first['coef']:g}",
        str(len(pairs)),
        *(f"{mean(pair[i]['gain'] for pair in pairs):+.4f}" for i in range(2)),
        interval(difference),
        _both(pairs, lambda r: r["retention"], ".3f"),
        _both(pairs, lambda r: r["kl_per_token"], ".4f"),
        _both(pairs, lambda r: _tenth(r["rewards"]), ".2f")
        + "; "
        + _both(pairs, lambda r: _tenth(r["rewards"][::-1]), ".2f"),
        _both(pairs, lambda r: r["seconds"], ".0f"),
        _both(pairs, lambda r: r["cpu_seconds"], ".0f"),
    ]


def interval(values: Sequence[float]) -> str:
    """Return a mean with its 95% interval by Student's t.

    >>> interval([0.1, 0.2, 0.3])
    '+0.2000 (-0.0484 to +0.4484)'
    >>> interval([0.1])
    '+0.1000'
    """
    return format_difference(mean_interval(values))


def _tenth(values: Sequence[float]) -> float:
    return mean(values[: max(1, len(values) // 10)])


def _both(pairs: Sequence[Pair], get: Callable[[Result], float | None], form: str) -> str:
    found = [[x for pair in pairs if (x := get(pair[i])) is not None] for i in range(2)]
    return ", ".join(format(mean(values), form) if values else "none" for values in found)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
