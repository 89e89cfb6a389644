"""Curves and lanes as SVG that takes the colours of its page."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from klinic.report.gaps import Lane
from klinic.report.reading import Story

STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text: it can be read aloud, found and escaped
    "svg.hashsalt": "klinic",
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
}
CURVES = (
    ("reward", ("reward", "eval/accuracy")),
    ("KL to the reference, nats per token", ("kl", "kl_exact/mean", "kl_coef")),
    ("entropy, nats per token", ("entropy",)),
    ("gradient norm", ("grad_norm", "grad_norm_clipped")),
    ("completions: length", ("completions/mean_length",)),
    ("completions: read, cut off", ("completions/parse_rate", "completions/clipped_ratio")),
)
LETTERS = "AB"  # what two runs are called where their names have no room
SMALLEST = 1e-7  # nats: below it float32 cannot tell a gap from none
TITLES = {
    "update": "policy after the update - before it",
    "sampler": "policy - sampler",
    "reference": "policy - reference",
}


def curves(stories: Sequence[Story]) -> str:
    """Return the metrics of runs over their steps, with what happened marked."""
    with matplotlib.style.context(["petroff10", STYLE]):
        figure = Figure(figsize=(11, 5.2), layout="constrained")
        for axis, (title, names) in zip(figure.subplots(2, 3).flat, CURVES, strict=True):
            for number, story in enumerate(stories):
                for place, name in enumerate(names):
                    style = {"ls": ("-", "--", ":")[place], "color": f"C{number}", "lw": 1.2}
                    steps, values = series(story.steps, name)
                    if len(steps):
                        label = name if len(stories) == 1 else f"{name} ({LETTERS[number]})"
                        axis.plot(steps, values, label=label, **style)
                for step in event_steps(story):
                    axis.axvline(step, color=f"C{number + 4}", lw=0.6, ls="--")
            axis.set_title(title)
            if axis.lines:
                axis.legend(frameon=False, fontsize=7)
        return _svg(figure, "curves over steps")


def gap_lanes(story: Story) -> str:
    """Return the three gaps over steps and positions, on one scale of colours."""
    with matplotlib.style.context(["petroff10", STYLE]):
        figure = Figure(figsize=(11, 2.6), layout="constrained")
        axes = figure.subplots(1, max(1, len(story.lanes)), squeeze=False)[0]
        largest = max((float(np.nanmax(lane.sizes, initial=0)) for lane in story.lanes), default=1)
        norm = LogNorm(SMALLEST, max(1.0, largest))
        for axis, lane in zip(axes, story.lanes, strict=False):
            image = _lane(axis, lane, norm)
        if story.lanes:
            figure.colorbar(image, ax=axes, label="nats", pad=0.01)
        return _svg(figure, "log-prob gaps")


def rewards_and_positions(story: Story) -> str:
    """Return what each reward gave over steps, and where in a completion the KL lies."""
    with matplotlib.style.context(["petroff10", STYLE]):
        figure = Figure(figsize=(11, 2.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name in reward_names(story.steps):
            left.plot(*series(story.steps, f"rewards/{name}/mean"), label=name, lw=1.2)
        left.set(title="rewards by function, before weights", xlabel="step")
        for label, values in story.kl_by_position.items():
            right.plot(np.arange(len(values)), values, label=label, lw=1.2)
        right.set(title="KL by position, nats (k3)", xlabel="token of the completion")
        for axis in (left, right):
            if axis.lines:
                axis.legend(frameon=False, fontsize=7)
        return _svg(figure, "rewards by function, and KL by position")


def reward_names(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the reward functions that a run has means of.

    >>> reward_names([{"rewards/legal/mean": 1.0, "rewards/legal/std": 0.0}])
    ['legal']
    """
    names = dict.fromkeys(name for step in steps for name in step)
    parts = (name.split("/") for name in names if name.startswith("rewards/"))
    return [part[1] for part in parts if len(part) == 3 and part[2] == "mean"]


def _lane(axis: Any, lane: Lane, norm: LogNorm) -> Any:
    sizes = np.clip(lane.sizes.T, SMALLEST, None)
    right = lane.sizes.shape[1] * lane.width
    image = axis.imshow(
        sizes,
        aspect="auto",
        origin="lower",
        norm=norm,
        cmap="cividis",  # even for those who see fewer colours
        extent=(lane.steps[0] - 0.5, lane.steps[-1] + 0.5, 0, right),
        interpolation="nearest",
    )
    axis.set(title=TITLES[lane.name], xlabel="step", ylabel="token")
    return image


def series(steps: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps in which a metric was a number, and the numbers."""
    known = [(s["step"], s[name]) for s in steps if isinstance(s.get(name), int | float)]
    return [step for step, _ in known], [value for _, value in known]


def event_steps(story: Story) -> list[int]:
    """Return the steps at which something happened to the run."""
    return sorted({e["step"] for e in story.events if isinstance(e.get("step"), int)})


def _svg(figure: Figure, title: str) -> str:
    """Return a figure to stand in a page: no prologue, and black is the colour of text there."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Title": title})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r"(fill|stroke): ?#000000", r"\1: currentColor", svg)
    opening = f'<svg role="img" aria-label="{title}" fill="currentColor" '
    return svg.replace("<svg ", opening, 1)
