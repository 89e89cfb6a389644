"""Plots the confusion matrix: injected cause against named cause."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from klinic.checks import CHECKS
from klinic.evidence.writing import write_atomically
from klinic.lab.scoreboard_outcome import HEALTHY, Outcome

NO_CAUSE = "nothing named"


def count_outcomes(outcomes: Sequence[Outcome]) -> tuple[list[str], list[str], np.ndarray]:
    """Return row names (injected), column names (named), and the count matrix."""
    order = [check.name for check in CHECKS]
    rows = [name for name in order if any(o.cause == name for o in outcomes)] + [HEALTHY]
    columns = [*order, NO_CAUSE]
    table = np.zeros((len(rows), len(columns)))
    for o in outcomes:
        table[rows.index(o.cause), columns.index(o.named or NO_CAUSE)] += 1
    return rows, columns, table


def plot_confusion(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the plot as PNG."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    rows, columns, table = count_outcomes(outcomes)
    share = table / np.maximum(table.sum(1, keepdims=True), 1)
    figure, axes = plt.subplots(figsize=(12, 11), layout="constrained")
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_xlabel("named")
    axes.set_ylabel("injected")
    for row, column in zip(*np.nonzero(table), strict=True):
        light = share[row, column] < 0.5
        axes.text(
            column,
            row,
            f"{int(table[row, column])}",
            ha="center",
            va="center",
            fontsize=7,
            color="black" if light else "white",
        )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_atomically(path, picture.getvalue())
    plt.close(figure)
