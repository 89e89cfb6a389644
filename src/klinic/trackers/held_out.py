"""A live table of held-out values: the first, the last, and a curve of each metric."""

import math
from collections.abc import Mapping

from rich.text import Text

from klinic.report.live_view import sparkline
from klinic.runtime.terminal_text import escape_for_terminal

MAX_ROWS = 12  # metrics; the others are in metrics.jsonl
MAX_NAME, VALUE, GAP = 32, 10, 2  # columns
MIN_CURVE, MAX_CURVE = 4, 40


class HeldOutTable:
    """Held-out values of each evaluation, by metric; it fits any width."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, float]] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of an evaluation."""
        for name, value in values.items():
            self._values.setdefault(escape_for_terminal(name), {})[step] = value

    def rewind(self, step: int) -> None:
        """Drop the evaluations after a step."""
        for name, values in self._values.items():
            self._values[name] = {at: value for at, value in values.items() if at <= step}

    @property
    def steps(self) -> list[int]:
        """The steps of all evaluations."""
        return sorted({step for values in self._values.values() for step in values})

    def lines(self, width: int) -> list[Text]:
        """Return the lines of the table, none wider than `width`; none before an evaluation."""
        if not self.steps:
            return []
        steps, names = self.steps, list(self._values)[:MAX_ROWS]
        columns = min(2, len(steps))
        room = width - columns * (VALUE + GAP)
        name_width = max(8, min(MAX_NAME, room, max(len(name) for name in [*names, "held out"])))
        curve = min(MAX_CURVE, room - name_width - GAP)
        heads = [f"step {step}" for step in (steps[0], steps[-1])[:columns]]
        lines = [Text(_join("held out", heads, name_width), style="dim")]
        for name in names:
            values = self._values[name]
            ends = [_format(values.get(step)) for step in (steps[0], steps[-1])[:columns]]
            line = Text(_join(name, ends, name_width))
            if columns == 2 and curve >= MIN_CURVE:
                line.append("  ").append(sparkline(list(values.values()), curve), style="cyan")
            lines.append(line)
        hidden = len(self._values) - len(names)
        if hidden:
            lines.append(Text(f"and {hidden} more in metrics.jsonl", style="dim"))
        for line in lines:
            line.truncate(width)
            line.no_wrap = True
        return lines


def _join(name: str, cells: list[str], width: int) -> str:
    short = name if len(name) <= width else name[: width - 1] + "…"
    return f"{short:<{width}}" + "".join(f"{cell:>{VALUE + GAP}}" for cell in cells)


def _format(value: float | None) -> str:
    if value is None:
        return ""
    if not math.isfinite(value):
        return "nan"
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.3g}"
