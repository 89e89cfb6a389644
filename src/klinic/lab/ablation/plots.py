"""Plots of an ablation, as PNG and SVG."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure

from klinic.evidence.writing import write_atomically
from klinic.lab.ablation.comparison import SettingRow
from klinic.lab.ablation.verdict import pareto_front

CURVES = {
    "reward": "reward",
    "kl": "KL to the reference, nats per token",
    "entropy": "entropy, nats per token",
    "eval/accuracy": "held-out accuracy",
}
SMOOTHING_STEPS = 10  # steps averaged per plotted point
FORMATS = ("png", "svg")
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "k"}

Curves = Mapping[str, Sequence[Sequence[Mapping[str, float]]]]
"""Metrics of every step by setting and seed."""


def write_plots(
    folder: Path, table: Sequence[SettingRow], curves: Curves, learnt: str
) -> list[Path]:
    """Write the plots; `learnt` names the measure of the trained skill. Return the SVG files."""
    with matplotlib.style.context(["petroff10", STYLE]):  # a colour-blind-safe palette
        figures = {"curves": _plot_curves(curves), "trade_off": _plot_trade_off(table, learnt)}
        for name, figure in figures.items():
            for kind in FORMATS:
                # no date: the same results give the same file
                facts = {"Date": None} if kind == "svg" else {}
                picture = io.BytesIO()
                figure.savefig(picture, format=kind, dpi=130, metadata=facts)
                write_atomically(folder / f"{name}.{kind}", picture.getvalue())
    return [folder / f"{name}.svg" for name in figures]


def _plot_curves(curves: Curves) -> Figure:
    """Plot each metric over steps: mean over seeds, with a band from minimum to maximum."""
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplots(2, 2).flat
    for axis, (name, label) in zip(axes, CURVES.items(), strict=True):
        for number, (setting, seeds) in enumerate(curves.items()):
            steps, values = _align_seeds(seeds, name)
            if len(steps):
                colour = f"C{number % 10}"
                axis.plot(steps, values.mean(axis=0), color=colour, label=setting, lw=1.4)
                axis.fill_between(
                    steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, lw=0
                )
        axis.set(xlabel="step", ylabel=label)
    figure.legend(
        *next(iter(figure.axes)).get_legend_handles_labels(), loc="outside lower center", ncols=4
    )
    return figure


def _align_seeds(
    seeds: Sequence[Sequence[Mapping[str, float]]], name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps common to all seeds and their values, smoothed if there are many."""
    by_step = [{e["step"]: e[name] for e in seed if name in e} for seed in seeds]
    steps = np.array(sorted(set.intersection(*(set(one) for one in by_step)) if by_step else set()))
    values = np.array([[one[step] for step in steps] for one in by_step], np.float64)
    if len(steps) < 3 * SMOOTHING_STEPS:
        return steps, values
    num = len(steps) // SMOOTHING_STEPS * SMOOTHING_STEPS
    return (
        steps[:num].reshape(-1, SMOOTHING_STEPS).mean(axis=1),
        values[:, :num].reshape(len(values), -1, SMOOTHING_STEPS).mean(axis=2),
    )


def _plot_trade_off(table: Sequence[SettingRow], learnt: str) -> Figure:
    """Plot learned skill and retention against KL, and against each other."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    for axis, x, y in (
        (first, "kl_token", learnt),
        (second, "kl_token", "retention"),
        (third, "retention", learnt),
    ):
        for number, row in enumerate(table):
            _plot_point(axis, row, x, y, f"C{number % 10}")
        axis.set(xlabel=_axis_label(x), ylabel=_axis_label(y))
    best = pareto_front(table, learnt)
    front = sorted((row.means["retention"].mean, row.means[learnt].mean) for row in best)
    third.plot(*zip(*front, strict=True) if front else ((), ()), color="0.6", lw=1, zorder=0)
    third.set_title("line: the Pareto front", fontsize=8, color="0.4")
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _plot_point(axis: Any, row: SettingRow, x: str, y: str, colour: str) -> None:
    across, up = row.means[x], row.means[y]
    spread = {
        f"{side}err": [[value.mean - value.low], [value.high - value.mean]]
        for side, value in (("x", across), ("y", up))
        if np.isfinite(value.half_width)
    }
    axis.errorbar(
        across.mean, up.mean, **spread, fmt="o", ms=4, lw=1, color=colour, label=row.setting
    )


def _axis_label(name: str) -> str:
    return {"kl_token": "KL to the start, nats per token"}.get(name, name)
