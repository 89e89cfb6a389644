"""What klinic and other doctors said of the same runs, as bars.

python -m bench.other_tools_picture FINDINGS PICTURE
"""

import json
import sys
from pathlib import Path

import matplotlib.style
from matplotlib.figure import Figure

from bench.other_tools import SPEAKERS, by_chance, summary
from klinic.lab.ablation.plots import STYLE

PARTS = {
    "first": ("right, said first", "#2a6f4e"),
    "later": ("right, among others", "#8fc1a5"),
    "else": ("only something else", "#c8553d"),
    "nothing": ("nothing", "#dddddd"),
}


def picture(findings: Path) -> Figure:
    """Return the drawing: a panel for each set of runs, a bar for each doctor."""
    told = [json.loads(line) for line in findings.read_text().splitlines()]
    counted = summary(told)
    boards = list(dict.fromkeys(board for board, _ in counted))
    with matplotlib.style.context(["petroff10", STYLE]):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        panels = figure.subplots(1, len(boards), sharey=True, squeeze=False)[0]
        for axis, board in zip(panels, boards, strict=True):
            rows = [counted[board, speaker] for speaker in SPEAKERS]
            left = [0] * len(rows)
            for part, (label, colour) in PARTS.items():
                width = [row[part] for row in rows]
                axis.barh(SPEAKERS, width, left=left, color=colour, label=label)
                left = [a + b for a, b in zip(left, width, strict=True)]
            here = [run for run in told if run["board"] == board]
            chance = [by_chance(here, speaker) for speaker in SPEAKERS]
            axis.plot(chance, SPEAKERS, "k|", markersize=17, label="right by chance")
            for place, row in enumerate(rows):
                alarms = f" {row['alarm']} of {row['alarm'] + row['silent']}"
                axis.text(left[place], place, alarms, va="center", fontsize=8)
            axis.text(max(left), -0.75, " false alarms", va="center", fontsize=8)
            axis.set_title(board)
            axis.set_xlabel("sick runs")
        panels[0].invert_yaxis()
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


if __name__ == "__main__":
    picture(Path(sys.argv[1])).savefig(sys.argv[2], dpi=130)
