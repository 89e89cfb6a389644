"""The KL of several runs over their steps, as a small SVG without a library to draw it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 84, 12, 36
SMOOTHED = 10  # steps: single ones are too noisy to tell three runs apart
THINNED = 3  # every third step is drawn: ten of them are one mean anyway
COLOURS = {"none": "#999999", "band": "#d08700", "log_pi": "#0060c0"}
LABELS = {"none": "no KL term", "band": "band", "log_pi": "log_pi"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The KL of one run, step by step."""

    name: str
    values: Sequence[float]


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and of up to nine before it.

    >>> smoothed([1.0, 3.0])
    [1.0, 2.0]
    """
    return [float(np.mean(values[max(0, i + 1 - SMOOTHED) : i + 1])) for i in range(len(values))]


def picture(curves: Sequence[Curve], *, target: float) -> str:
    """Return the drawing: a line a run, a dashed one for the target, a label a controller."""
    lines = [smoothed(curve.values) for curve in curves]
    steps, top = max(map(len, lines)), 1.05 * max(map(max, lines))

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(kl: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * kl / top

    parts = [_axes(x, y, steps=steps, top=top), _dashes(x(0), x(steps), y(target))]
    for curve, line in zip(curves, lines, strict=True):
        every = range(0, len(line), THINNED)
        points = " ".join(f"{x(i + 1):.1f},{y(line[i]):.1f}" for i in every)
        stroke = f'stroke="{COLOURS[curve.name]}" stroke-width="1.3" fill="none"'
        parts.append(f'<polyline {stroke} points="{points}"/>')
    parts += [_label(name, i) for i, name in enumerate(dict.fromkeys(c.name for c in curves))]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    font = 'font-family="sans-serif" font-size="12"'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    return "\n".join([start, ground, *parts, "</svg>\n"])


def _axes(x, y, *, steps: int, top: float) -> str:  # type: ignore[no-untyped-def]
    stroke = 'stroke="#333333" fill="none"'
    parts = [f'<path {stroke} d="M{x(0)} {TOP} V{y(0)} H{x(steps)}"/>']
    for step in range(0, steps + 1, 50):
        parts.append(f'<text x="{x(step):.1f}" y="{y(0) + 15}" text-anchor="middle">{step}</text>')
    for kl in np.arange(0, top, 0.05):
        text = f'y="{y(kl) + 4:.1f}" text-anchor="end">{kl:.2f}</text>'
        parts.append(f'<text x="{LEFT - 5}" {text}')
    middle = (x(0) + x(steps)) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">step</text>')
    turned = f'transform="translate(12 {HEIGHT / 2}) rotate(-90)" text-anchor="middle"'
    parts.append(f"<text {turned}>KL, nats per token</text>")
    return "\n".join(parts)


def _dashes(left: float, right: float, y: float) -> str:
    line = f'<path stroke="#c00000" stroke-dasharray="6 4" d="M{left} {y:.1f} H{right}"/>'
    return f'{line}\n<text x="{right + 5}" y="{y + 4:.1f}" fill="#c00000">target</text>'


def _label(name: str, place: int) -> str:
    at = f'x="{WIDTH - RIGHT + 5}" y="{TOP + 14 + 17 * place}"'
    return f'<text {at} fill="{COLOURS[name]}">{LABELS[name]}</text>'
