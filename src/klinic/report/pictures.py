"""Renders curves and gap lanes as SVG that inherits the page's colours."""

import html
import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from klinic.report.curves import Series
from klinic.report.logp_gaps import MAX_NATS, GapLane
from klinic.report.reading import RunReport
from klinic.report.timeline_events import KINDS, TimelineEvent
from klinic.runtime.terminal_text import escape_for_terminal

STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text: accessible, searchable, escapable
    "svg.hashsalt": "klinic",
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "text.parse_math": False,  # a reward may be named $x
}
CURVES = (
    ("reward", ("reward", "eval/accuracy")),
    ("KL to the reference, nats per token", ("kl", "kl_exact/mean", "kl_coef")),
    ("entropy, nats per token", ("entropy",)),
    ("gradient norm", ("grad_norm", "grad_norm_clipped")),
    ("completions: length", ("completions/mean_length",)),
    ("completions: read, cut off", ("completions/parse_rate", "completions/clipped_ratio")),
)
MARK_COLOUR = "#b07d1a"  # mark colour of a single run: visible on white and on black
STACK_FRACTION = (
    0.08  # vertical distance between marks of one step, as a fraction of the panel height
)
LONGEST_LABEL = 40
HALF_WINDOWS = 30  # window divisor: a long curve is averaged over 2 / 30 of its points
MIN_HALF_WINDOW = 2  # minimum half window; shorter curves are drawn unsmoothed
LETTERS = "AB"  # short names of two compared runs
MIN_NATS = 1e-7  # nats: float32 cannot resolve smaller gaps
TITLES = {
    "update": "policy after the update - before it",
    "sampler": "policy - sampler",
    "reference": "policy - reference",
}


def curves_svg(stories: Sequence[RunReport]) -> str:
    """Return the metrics of runs over their steps, with timeline events marked."""
    with matplotlib.style.context(["petroff10", STYLE]):
        figure = Figure(figsize=(11, 5.2), layout="constrained")
        axes = figure.subplots(2, 3, sharex=True).flat
        descriptions: dict[str, str] = {}
        for panel, (axis, (title, names)) in enumerate(zip(axes, CURVES, strict=True)):
            for number, story in enumerate(stories):
                label = "{}" if len(stories) == 1 else f"{{}} ({LETTERS[number]})"
                for index, name in enumerate(names):
                    _plot_metric(
                        axis,
                        story.curves.downsampled_series(name),
                        label.format(name),
                        number,
                        index,
                    )
            axis.set_title(title)
            if axis.lines:
                axis.legend(frameon=False, fontsize=7)
            descriptions |= _draw_marks(axis, panel, stories)
        return _add_titles(_to_svg(figure, "curves over steps"), descriptions)


def _plot_metric(axis: Any, series: Series, label: str, run: int, index: int) -> None:
    """Plot a metric; dots mark the second run, so that colour is not needed."""
    steps, _ = series
    if not steps:
        return
    dots = {"marker": "o", "ms": 3.5, "markevery": max(1, len(steps) // 12)} if run else {}
    style = {"ls": ("-", "--", ":")[index], "color": f"C{run}", "lw": 1.2}
    _plot_line(axis, series, label=label, **style, **dots)


def _plot_line(axis: Any, series: Series, **style: Any) -> None:
    """Plot a curve; a long one as its moving average over the faint raw values."""
    steps, values = series
    half = len(steps) // HALF_WINDOWS
    if half < MIN_HALF_WINDOW:
        axis.plot(steps, values, **style)
        return
    (line,) = axis.plot(steps, moving_average(np.asarray(values, np.float64), half), **style)
    axis.plot(steps, values, color=line.get_color(), alpha=0.35, lw=0.6, zorder=1)


def moving_average(values: np.ndarray, half: int) -> np.ndarray:
    """Return the centred moving average with up to `half` neighbours on either side.

    Windows shrink towards both ends, so a KL that starts at 0 is drawn from 0. Non-finite values
    are ignored.

    >>> moving_average(np.array([0.0, 6.0, 3.0, np.nan, 5.0]), 1).tolist()
    [0.0, 3.0, 4.5, 4.0, 5.0]
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    reach = np.minimum(half, np.minimum(index, index[::-1]))
    first, last = index - reach, index + reach + 1
    num = counts[last] - counts[first]
    return np.where(num > 0, (sums[last] - sums[first]) / np.maximum(num, 1), np.nan)


def _draw_marks(axis: Any, panel: int, stories: Sequence[RunReport]) -> dict[str, str]:
    """Draw the timeline events of the runs; return their descriptions by element id.

    Marks of a second run are at the lower edge, so that colour is not needed to distinguish the
    runs.
    """
    descriptions = {}
    for number, story in enumerate(stories):
        prefix = "" if len(stories) == 1 else f"{LETTERS[number]}, "
        colour = MARK_COLOUR if len(stories) == 1 else f"C{number}"
        for index, mark in enumerate(story.marks):
            name = f"mark-{panel}-{number}-{index}"
            descriptions[name] = prefix + mark.description
            earlier = sum(m.step == mark.step and m.last is None for m in story.marks[:index])
            away = STACK_FRACTION * (earlier % 6)  # stack the marks of one step
            height = 1.0 - away if number == 0 else away
            _draw_mark(axis, mark, name=name, colour=colour, height=height)
    return descriptions


def _draw_mark(axis: Any, mark: TimelineEvent, *, name: str, colour: str, height: float) -> None:
    if mark.last is not None:
        last = min(mark.last, axis.dataLim.x1) if axis.lines else mark.last
        span = (mark.step - 0.5, max(mark.step, last) + 0.5)
        axis.axvspan(*span, facecolor=colour, alpha=0.15, hatch="///", lw=0, gid=name)
        return
    axis.axvline(mark.step, color=colour, lw=0.7, ls=(0, (1, 2)))
    axis.plot(
        *([mark.step], [height]),
        marker=KINDS[mark.kind].shape,
        color=colour,
        ms=7,
        mec="none",
        clip_on=False,
        transform=axis.get_xaxis_transform(),
        gid=name,
    )


def _add_titles(svg: str, descriptions: Mapping[str, str]) -> str:
    """Add descriptions to marks: titles for the mouse, keyboard focus in the first panel."""

    def open_tag(match: re.Match[str]) -> str:
        name = match[1]
        words = html.escape(escape_for_terminal(descriptions[name]))
        focus = ' tabindex="0"' if name.startswith("mark-0-") else ""
        label = f' class="mark" role="img" aria-label="{words}"{focus}'
        return f'<g id="{name}"{label}><title>{words}</title>'

    return re.sub(r'<g id="(mark-[0-9-]+)">', open_tag, svg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Axis limits shared by the pictures of several runs, for comparison."""

    largest: float
    """Gap, nats."""
    first: int
    last: int
    """Steps."""
    longest: int
    """Tokens."""
    reward: tuple[float, float]
    kl: float


def scale_of(stories: Sequence[RunReport]) -> Scale:
    """Return axis limits that fit all runs."""
    every = [lane for story in stories for lane in story.lanes]
    steps = [step for lane in every for step in lane.steps] or [1]
    rewards = [
        value
        for story in stories
        for name in story.curves.reward_names
        for value in story.curves.series(_mean_key(name))[1]
        if math.isfinite(value)
    ] or [0.0]
    kl = [
        value
        for story in stories
        for values in story.kl_by_position.values()
        for value in values
        if value <= MAX_NATS
    ]
    return Scale(
        largest=min(MAX_NATS, max([1.0, *(_largest_size(lane.sizes) for lane in every)])),
        first=min(steps),
        last=max(steps),
        longest=max([1, *(lane.sizes.shape[1] * lane.width for lane in every)]),
        reward=(min(rewards), max(rewards)),
        kl=max([0.0, *kl]),
    )


def _largest_size(sizes: np.ndarray) -> float:
    return float(np.nanmax(sizes, initial=0))


def gap_lanes(story: RunReport, scale: Scale) -> str:
    """Return the three gaps by step and position, on one colour scale."""
    with matplotlib.style.context(["petroff10", STYLE]):
        figure = Figure(figsize=(11, 2.6), layout="constrained")
        axes = figure.subplots(1, max(1, len(story.lanes)), squeeze=False)[0]
        norm = LogNorm(MIN_NATS, scale.largest)
        for axis, lane in zip(axes, story.lanes, strict=False):
            image = _draw_lane(axis, lane, norm)
            axis.set(xlim=(scale.first - 0.5, scale.last + 0.5), ylim=(0, scale.longest))
        if story.lanes:
            figure.colorbar(image, ax=axes, label="nats", pad=0.01, format=lambda v, _: f"{v:g}")
        return _to_svg(figure, "log-prob gaps")


def rewards_and_positions(story: RunReport, scale: Scale) -> str:
    """Return each reward's mean over steps, and the KL by token position."""
    with matplotlib.style.context(["petroff10", STYLE]):
        figure = Figure(figsize=(11, 2.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for index, name in enumerate(story.curves.reward_names):
            style = ("-", "--", ":", "-.")[index % 4]
            series = story.curves.downsampled_series(_mean_key(name))
            _plot_line(left, series, label=_legend_label(name), lw=1.2, ls=style)
        left.set(title="rewards by function, before weights", xlabel="step")
        left.set(xlim=(scale.first - 0.5, scale.last + 0.5), ylim=_pad_limits(*scale.reward))
        for (label, values), style in zip(story.kl_by_position.items(), ("--", "-"), strict=False):
            heights = np.where(np.asarray(values) <= MAX_NATS, values, np.nan)
            right.plot(np.arange(len(values)), heights, label=label, lw=1.2, ls=style)
        right.set(title="KL by position, nats (k3)", xlabel="token of the completion")
        right.set(xlim=(-0.5, scale.longest), ylim=_pad_limits(0.0, scale.kl))
        for axis in (left, right):
            if axis.lines:
                axis.legend(frameon=False, fontsize=7)
        return _to_svg(figure, "rewards by function, and KL by position")


def _draw_lane(axis: Any, lane: GapLane, norm: LogNorm) -> Any:
    sizes = np.clip(lane.sizes.T, MIN_NATS, MAX_NATS)
    right = lane.sizes.shape[1] * lane.width
    image = axis.imshow(
        sizes,
        aspect="auto",
        origin="lower",
        norm=norm,
        cmap="cividis",  # perceptually uniform, also for colour-blind readers
        extent=(lane.steps[0] - 0.5, lane.steps[-1] + 0.5, 0, right),
        interpolation="nearest",
    )
    axis.set(title=TITLES[lane.name], xlabel="step", ylabel="token")
    return image


def _mean_key(name: str) -> str:
    return f"rewards/{name}/mean"


def _legend_label(name: str) -> str:
    # matplotlib omits labels that begin with an underscore from legends
    words = escape_for_terminal(name)[:LONGEST_LABEL]
    return f" {words}" if words.startswith("_") else words


def _pad_limits(low: float, high: float) -> tuple[float, float]:
    edge = 0.05 * (high - low) or 0.05
    return low - edge, high + edge


def _to_svg(figure: Figure, title: str) -> str:
    """Return a figure as inline SVG: no XML prologue, black replaced by the page's text colour."""
    text = io.StringIO()
    with warnings.catch_warnings():  # a reward's name may use glyphs that the font lacks
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(
            text, format="svg", transparent=True, metadata={"Date": None, "Title": title}
        )
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r"(fill|stroke): ?#000000", r"\1: currentColor", svg)
    opening = f'<svg role="img" aria-label="{title}" fill="currentColor" '
    return svg.replace("<svg ", opening, 1)
