"""Heat map and gaps as text, for terminals with many colours, few, or none.

rich picks the nearest available colours. Without colours, tokens with a large KL carry its value
instead. Control characters are escaped.
"""

import math
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from klinic.harmless import harmless
from klinic.report.gaps import Lane
from klinic.report.heat import DISAGREES, Completion, HeatStep, Token, largest
from klinic.report.reading import Story

SHADES = " ░▒▓█"
SMALLEST, OPEN = 1e-6, 1.0  # nats: range of the shades, on a log scale
COLUMNS, ROWS = 60, 4  # size of a lane
MORE, LESS = (213, 94, 0), (0, 114, 178)  # orange and blue, distinguishable for most people
TOLD = 0.5  # fraction of the largest KL from which a token shows its value without colours


def print_story(story: Story, console: Console, step: int | None) -> None:
    """Print the gaps of a run, and the heat map of one step."""
    for lane in story.lanes:
        console.print(lane_text(lane))
    shown = chosen(story.heat, step)
    console.print(f"\nStep {shown.step}: KL to the reference, token by token")
    if shown.owners:
        console.print(
            f"Half of it is owned by {shown.num_owners} of {shown.num_tokens} tokens: "
            + ", ".join(f"{harmless(o.text)!r} {o.share:.1%}" for o in shown.owners[:6]),
            markup=False,
            highlight=False,
        )
    scale = largest(story.heat)
    for completion in shown.completions:
        console.print(completion_text(completion, scale, colours=has_colours(console)))


def has_colours(console: Console) -> bool:
    """Whether the terminal shows colours and NO_COLOR is unset."""
    return console.color_system is not None and not console.no_color


def chosen(heat: Sequence[HeatStep], step: int | None) -> HeatStep:
    """Return the requested step, or the nearest one available; the last if none is requested."""
    if step is None:
        return heat[-1]
    return min(heat, key=lambda one: abs(one.step - step))


def lane_text(lane: Lane) -> Text:
    """Return a lane as shades: steps from left to right, first tokens at the bottom."""
    sizes = _pooled(lane.sizes)
    known = lane.sizes[np.isfinite(lane.sizes)]
    mean = float(known.mean()) if known.size else math.nan
    lines = [f"policy - {lane.name}" if lane.name != "update" else "update"]
    lines[0] += f": mean gap {mean:.2g} nats, steps {lane.steps[0]} to {lane.steps[-1]}"
    lines += ["  " + "".join(shade(size) for size in row) for row in sizes.T[::-1]]
    return Text("\n".join(lines))


def shade(size: float) -> str:
    """Return the shade of a gap.

    >>> [shade(size) for size in (0.0, 1e-5, 1e-3, 0.1, 3.0)]
    [' ', '░', '▒', '▓', '█']
    """
    if not size > SMALLEST:  # also true for NaN
        return SHADES[0]
    share = math.log(min(size, OPEN) / SMALLEST) / math.log(OPEN / SMALLEST)
    return SHADES[min(len(SHADES) - 1, 1 + int(share * (len(SHADES) - 2)))]


def completion_text(completion: Completion, scale: float, *, colours: bool) -> Text:
    """Return a completion with its prompt, each token on the colour of its KL."""
    reward = "" if completion.reward is None else f", reward {completion.reward:.3f}"
    text = Text().append(f"completion {completion.row}{reward}\n", style="dim")
    text.append(harmless(completion.prompt), style="dim")
    for token in completion.tokens:
        text.append(*_token(token, scale, colours=colours))
    if completion.num_hidden:
        text.append(f" ... {completion.num_hidden} more", style="dim")
    return text


def _token(token: Token, scale: float, *, colours: bool) -> tuple[str, str]:
    words = harmless(token.text)
    if token.kl is None or not token.trained:
        return words, "dim"
    style = "underline " if abs(token.sampler or 0.0) > DISAGREES else ""
    if not colours:
        told = abs(token.kl) >= TOLD * scale
        return f"{words}[{token.kl:+.1f}]" if told else words, style
    strength = min(1.0, abs(token.kl) / scale)
    if strength < 0.05:
        return words, style
    tint = MORE if token.kl > 0 else LESS
    red, green, blue = (round(255 - strength * (255 - part)) for part in tint)
    return words, f"{style}black on rgb({red},{green},{blue})"


def _pooled(sizes: np.ndarray) -> np.ndarray:
    """Return a lane averaged down to the available columns and rows."""
    for axis, room in ((0, COLUMNS), (1, ROWS)):
        parts = np.array_split(sizes, min(room, sizes.shape[axis]), axis=axis)
        means = [_mean(part, axis) for part in parts]
        sizes = np.stack(means, axis=axis)
    return sizes


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    known = np.isfinite(values)
    count = known.sum(axis=axis)
    total = np.where(known, values, 0.0).sum(axis=axis)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan))
