"""Live view of the demo: three curves in a terminal, occasional lines elsewhere."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Rollout
from klinic.report.live_view import sparkline

WIDTH = 36  # characters of a curve
EVERY = 10  # steps between lines outside a terminal


@dataclass(slots=True, kw_only=True)
class Curve:
    """One metric over the steps."""

    label: str
    metric: str
    digits: int
    values: dict[int, float] = field(default_factory=dict)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Add the value of a step; return whether the metric is present."""
        if self.metric in metrics:
            self.values[step] = metrics[self.metric]
        return self.metric in metrics

    def format_last(self) -> str:
        """Format the label and the last value."""
        return f"{self.label}: {[*self.values.values()][-1]:.{self.digits}f}"


class DemoView:
    """A metrics sink that draws reward, held-out accuracy and KL."""

    def __init__(self, console: Console, *, max_steps: int) -> None:
        self._console = console
        self._max_steps = max_steps
        self._live: Live | None = None
        self._bar = Progress(
            TextColumn("Training"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=max_steps)
        self.reward = Curve(label="Reward", metric="reward", digits=3)
        self.accuracy = Curve(label="Held-out accuracy", metric="eval/accuracy", digits=3)
        self.kl = Curve(label="KL per token, nats", metric="kl", digits=4)

    @property
    def _curves(self) -> tuple[Curve, ...]:
        return self.reward, self.accuracy, self.kl

    def __rich__(self) -> Group:
        table = Table.grid(padding=(0, 2))
        rows = [_curve_label(curve) for curve in self._curves]
        taken = sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True))
        width = max(1, min(WIDTH, self._console.width - taken))
        for curve, row in zip(self._curves, rows, strict=True):
            drawn = draw_curve(curve.values, self._max_steps, width) if curve.values else ""
            table.add_row(*row, drawn)
        return Group(self._bar, table)

    def begin(self, *, step: int) -> None:
        """Show the curves."""
        self._bar.update(self._task, completed=step)
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=8)
            self._live.start()

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step or an evaluation."""
        self._bar.update(self._task, completed=step)
        updated = [curve for curve in self._curves if curve.add_metrics(step, metrics)]
        due = self.accuracy in updated or step == 1 or step % EVERY == 0
        if self._live is None and updated and due:
            summary = " | ".join(curve.format_last() for curve in updated)
            self._console.print(f"Step {step} | {summary}", highlight=False, soft_wrap=True)

    def log_completions(self, step: int, rollouts: Sequence[Rollout], record: StepRecord) -> None:
        """Ignore completions: the report shows them."""

    def rewind(self, step: int) -> None:
        """Drop the values after a step."""
        for curve in self._curves:
            curve.values = {at: value for at, value in curve.values.items() if at <= step}
        self._bar.update(self._task, completed=step)

    def log_message(self, step: int, message: str) -> None:
        """Print an event above the curves, without the fix, which is printed at the end."""
        line = Text(f"Step {step} | {message.partition(' Fix: ')[0]}", style="yellow")
        # outside a terminal, rich would break words
        self._console.print(line, highlight=False, soft_wrap=not self._console.is_terminal)

    def close(self) -> None:
        """Stop updating the curves."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _curve_label(curve: Curve) -> tuple[str, str]:
    """Return the label of a curve, and its first and last value."""
    if not curve.values:
        return curve.label, ""
    values = [*curve.values.values()]
    return curve.label, f"{values[0]:.{curve.digits}f} -> {values[-1]:.{curve.digits}f}"


def draw_curve(values: Mapping[int, float], max_steps: int, width: int = WIDTH) -> str:
    """Return a sparkline of values over steps.

    A character shows the mean of its steps; one without steps repeats the previous character, and a
    non-finite value has no bar.

    >>> draw_curve({0: 0.0, 10: 0.5, 20: 1.0}, 20, width=5)
    '▁▁▅▅█'
    >>> draw_curve({1: 0.0, 2: math.nan, 3: 1.0}, 3, width=4)
    '▁▁ █'
    """
    by_column: dict[int, list[float]] = {}
    for step, value in values.items():
        by_column.setdefault(step * (width - 1) // max(1, max_steps), []).append(value)
    means = {
        column: sum(column_values) / len(column_values)
        for column, column_values in by_column.items()
    }
    finite = {column: mean for column, mean in means.items() if math.isfinite(mean)}
    columns: list[float | None] = []
    last: float | None = min(finite.values(), default=0.0)
    for column in range(max(means) + 1):
        last = finite.get(column) if column in means else last
        columns.append(last)
    return sparkline(columns, width)
