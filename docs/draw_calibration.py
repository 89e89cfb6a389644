"""Draw the calibration of the doctor on blind cases: `python docs/draw_calibration.py`.

Reads `explanation/data/blind-verdicts.jsonl`, one diagnosis of a sick case per line, and writes the
table and the reliability diagram of the scoreboard page. A line has the `set` of the case, whether
it was `read` by the authors of checks before this diagnosis, whether the case is `decidable`, the
cause `named` first (or null) with its `confidence`, and the `verdict`: right, wrong or abstained.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
DATA = DOCS / "explanation" / "data" / "blind-verdicts.jsonl"
PAGE = DOCS / "explanation" / "scoreboard.md"
PICTURE = DOCS / "explanation" / "images" / "calibration.svg"
TABLE = re.compile(r"(<!-- table: calibration -->\n).*?(<!-- end -->)", re.DOTALL)
EDGES = (0.0, 0.6, 0.8, 0.9, 0.95, 1.0)
CERTAIN = 0.9  # from here a cause is stated without reserve
Z = 1.96  # of a 95% interval
SIZE, LEFT, TOP = 320, 56, 16  # pixels
COLOURS = ("#1f6feb", "#d29922", "#2da44e", "#8250df")


@dataclass(frozen=True, slots=True)
class Bin:
    """Named causes with a similar confidence."""

    low: float
    high: float
    num: int
    num_right: int
    confidence: float
    """Mean."""

    @property
    def fraction(self) -> float:
        """Fraction that is right."""
        return self.num_right / self.num

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the fraction (Wilson)."""
        centre = (self.fraction + Z**2 / (2 * self.num)) / (1 + Z**2 / self.num)
        spread = self.fraction * (1 - self.fraction) / self.num + Z**2 / (4 * self.num**2)
        half = Z * math.sqrt(spread) / (1 + Z**2 / self.num)
        return max(centre - half, 0.0), min(centre + half, 1.0)


def read_verdicts(path: Path = DATA) -> list[dict[str, Any]]:
    """Return the diagnoses."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def group_by_set(verdicts: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the diagnoses by set, those of sets that were read before apart."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for verdict in verdicts:
        title = verdict["set"] + (", diagnosed again after it was read" if verdict["read"] else "")
        sets.setdefault(title, []).append(verdict)
    return sets


def bins_of(verdicts: Iterable[dict[str, Any]]) -> Iterator[Bin]:
    """Yield the bins that have a named cause."""
    named = [v for v in verdicts if v["named"] is not None]
    for low, high in pairwise(EDGES):
        inside = [v for v in named if low <= v["confidence"] < high or high == v["confidence"] == 1]
        if inside:
            num_right = sum(v["verdict"] == "right" for v in inside)
            mean = sum(v["confidence"] for v in inside) / len(inside)
            yield Bin(low, high, len(inside), num_right, mean)


def table(verdicts: Sequence[dict[str, Any]]) -> str:
    """Return the table of the page."""
    lines = [
        "| cases | confidence | causes named | mean confidence | right | 95% interval |",
        "|---|---|---|---|---|---|",
    ]
    for title, each in group_by_set(verdicts).items():
        for found in bins_of(each):
            low, high = found.interval
            lines.append(
                f"| {title} | {found.low:.0%} to {found.high:.0%} | {found.num} | "
                f"{found.confidence:.0%} | {found.num_right} ({found.fraction:.0%}) | "
                f"{low:.0%} to {high:.0%} |"
            )
    return "\n".join([*lines, "", *_sentences(verdicts), ""])


def _sentences(verdicts: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield for each set how many certain verdicts are right, and how many right ones certain."""
    for title, each in group_by_set(verdicts).items():
        right = [v for v in each if v["verdict"] == "right"]
        certain = [v for v in each if v["named"] is not None and v["confidence"] >= CERTAIN]
        both = sum(v["confidence"] >= CERTAIN for v in right)
        yield (
            f"- {title}: {both} of {len(certain)} causes with a confidence of at least "
            f"{CERTAIN:.0%} are right, and {both} of {len(right)} right ones reach it."
        )


def draw(verdicts: Sequence[dict[str, Any]]) -> str:
    """Return the reliability diagram as SVG: fraction right over mean confidence."""
    sets = group_by_set(verdicts)
    height = TOP + SIZE + 56 + 18 * len(sets)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + SIZE + 190}" height="{height}" '
        'font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" role="img" '
        'aria-label="Fraction of named causes that are right, over their confidence">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<path d="M{_x(0)} {_y(0)}L{_x(1)} {_y(1)}" stroke="#888" stroke-dasharray="4 3"/>',
        f'<rect x="{LEFT}" y="{TOP}" width="{SIZE}" height="{SIZE}" fill="none" stroke="#444"/>',
        *_ticks(),
    ]
    for number, (title, each) in enumerate(sets.items()):
        colour = COLOURS[number % len(COLOURS)]
        parts += [_mark(found, colour, number) for found in bins_of(each)]
        y = TOP + SIZE + 56 + 18 * number
        parts.append(f'<circle cx="{LEFT + 6}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 16}" y="{y}">{title}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _ticks() -> Iterator[str]:
    for tenth in range(0, 11, 2):
        value = tenth / 10
        yield f'<text x="{_x(value)}" y="{TOP + SIZE + 14}" text-anchor="middle">{value:.0%}</text>'
        yield f'<text x="{LEFT - 6}" y="{_y(value) + 4}" text-anchor="end">{value:.0%}</text>'
    middle = TOP + SIZE / 2
    yield f'<text x="{_x(0.5)}" y="{TOP + SIZE + 32}" text-anchor="middle">mean confidence</text>'
    yield (
        f'<text x="12" y="{middle:g}" text-anchor="middle" '
        f'transform="rotate(-90 12 {middle:g})">fraction right</text>'
    )


def _mark(found: Bin, colour: str, number: int) -> str:
    """Return a point with its interval; sets are drawn three pixels apart."""
    x, (low, high) = _x(found.confidence) - 3 * number, found.interval
    return (
        f'<path d="M{x:g} {_y(low)}V{_y(high)}" stroke="{colour}"/>'
        f'<circle cx="{x:g}" cy="{_y(found.fraction)}" r="4" fill="{colour}"/>'
        f'<text x="{_x(1) + 8}" y="{_y(found.fraction) + 4 + 12 * number}" fill="{colour}">'
        f"{found.num_right} of {found.num} at {found.confidence:.0%}</text>"
    )


def _x(value: float) -> float:
    return round(LEFT + SIZE * value, 1)


def _y(value: float) -> float:
    return round(TOP + SIZE * (1 - value), 1)


def written(page: str, verdicts: Sequence[dict[str, Any]]) -> str:
    """Return the page with its table made anew."""
    return TABLE.sub(lambda found: found[1] + table(verdicts) + found[2], page)


if __name__ == "__main__":
    rows = read_verdicts()
    PICTURE.write_text(draw(rows))
    PAGE.write_text(written(PAGE.read_text(), rows))
