"""Heat map and gaps as text, for terminals with many colours, few, or none.

rich picks the nearest available colours. Without colours, tokens with a large KL carry its value
instead. Control characters are escaped.
"""

import math
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from klinic.report.logp_gaps import GapLane
from klinic.report.reading import RunReport
from klinic.report.token_heatmap import (
    SAMPLER_GAP_LIMIT,
    Completion,
    HeatmapStep,
    Token,
    colour_limit,
)
from klinic.runtime.terminal_text import escape_for_terminal

SHADES = " ░▒▓█"
MIN_NATS, MAX_NATS = 1e-6, 1.0  # nats: range of the shades, on a log scale
COLUMNS, ROWS = 60, 4  # size of a lane
MORE, LESS = (213, 94, 0), (0, 114, 178)  # orange and blue, distinguishable for most people
LABEL_FRACTION = (
    0.5  # fraction of the largest KL from which a token shows its value without colours
)


def print_run_report(story: RunReport, console: Console, step: int | None) -> None:
    """Print the gaps of a run, and the heat map of one step."""
    for lane in story.lanes:
        console.print(lane_text(lane))
    shown = select_step(story.heat, step)
    console.print(f"\nStep {shown.step}: KL to the reference, token by token")
    if shown.owners:
        console.print(
            f"Half of it is owned by {shown.num_owners} of {shown.num_tokens} tokens: "
            + ", ".join(f"{escape_for_terminal(o.text)!r} {o.share:.1%}" for o in shown.owners[:6]),
            markup=False,
            highlight=False,
        )
    scale = colour_limit(story.heat)
    for completion in shown.completions:
        console.print(completion_text(completion, scale, colours=has_colours(console)))


def has_colours(console: Console) -> bool:
    """Whether the terminal shows colours and NO_COLOR is unset."""
    return console.color_system is not None and not console.no_color


def select_step(heat: Sequence[HeatmapStep], step: int | None) -> HeatmapStep:
    """Return the requested step, or the nearest one available; the last if none is requested."""
    if step is None:
        return heat[-1]
    return min(heat, key=lambda one: abs(one.step - step))


def lane_text(lane: GapLane) -> Text:
    """Return a lane as shades: steps from left to right, first tokens at the bottom."""
    sizes = _pool_lane(lane.sizes)
    finite = lane.sizes[np.isfinite(lane.sizes)]
    mean = float(finite.mean()) if finite.size else math.nan
    lines = [f"policy - {lane.name}" if lane.name != "update" else "update"]
    lines[0] += f": mean gap {mean:.2g} nats, steps {lane.steps[0]} to {lane.steps[-1]}"
    lines += ["  " + "".join(shade(size) for size in row) for row in sizes.T[::-1]]
    return Text("\n".join(lines))


def shade(size: float) -> str:
    """Return the shade of a gap.

    >>> [shade(size) for size in (0.0, 1e-5, 1e-3, 0.1, 3.0)]
    [' ', '░', '▒', '▓', '█']
    """
    if not size > MIN_NATS:  # also true for NaN
        return SHADES[0]
    fraction = math.log(min(size, MAX_NATS) / MIN_NATS) / math.log(MAX_NATS / MIN_NATS)
    return SHADES[min(len(SHADES) - 1, 1 + int(fraction * (len(SHADES) - 2)))]


def completion_text(completion: Completion, scale: float, *, colours: bool) -> Text:
    """Return a completion with its prompt, each token on the colour of its KL."""
    reward = "" if completion.reward is None else f", reward {completion.reward:.3f}"
    text = Text().append(f"completion {completion.row}{reward}\n", style="dim")
    text.append(escape_for_terminal(completion.prompt), style="dim")
    for token in completion.tokens:
        text.append(*_styled_token(token, scale, colours=colours))
    if completion.num_hidden:
        text.append(f" ... {completion.num_hidden} more", style="dim")
    return text


def _styled_token(token: Token, scale: float, *, colours: bool) -> tuple[str, str]:
    words = escape_for_terminal(token.text)
    if token.kl is None or not token.trained:
        return words, "dim"
    style = "underline " if abs(token.sampler or 0.0) > SAMPLER_GAP_LIMIT else ""
    if not colours:
        is_labelled = abs(token.kl) >= LABEL_FRACTION * scale
        return f"{words}[{token.kl:+.1f}]" if is_labelled else words, style
    strength = min(1.0, abs(token.kl) / scale)
    if strength < 0.05:
        return words, style
    tint = MORE if token.kl > 0 else LESS
    red, green, blue = (round(255 - strength * (255 - part)) for part in tint)
    return words, f"{style}black on rgb({red},{green},{blue})"


def _pool_lane(sizes: np.ndarray) -> np.ndarray:
    """Return a lane averaged down to the available columns and rows."""
    for axis, room in ((0, COLUMNS), (1, ROWS)):
        parts = np.array_split(sizes, min(room, sizes.shape[axis]), axis=axis)
        means = [_finite_mean(part, axis) for part in parts]
        sizes = np.stack(means, axis=axis)
    return sizes


def _finite_mean(values: np.ndarray, axis: int) -> np.ndarray:
    finite = np.isfinite(values)
    count = finite.sum(axis=axis)
    total = np.where(finite, values, 0.0).sum(axis=axis)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan))
