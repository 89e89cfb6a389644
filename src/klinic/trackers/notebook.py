"""Notebook tracker: a progress bar and the last metrics, updated in place in a cell's output.

It needs IPython's display alone, no widgets.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.console import Console

from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Rollout
from klinic.trackers.console import LINE_METRICS, NUM_SHOWN_COMPLETIONS, short_labels
from klinic.trackers.format import COMPLETION_COLUMNS, completion_rows

NUM_SHOWN_STEPS = 10  # rows of the table
NUM_SHOWN_MESSAGES = 20


def runs_in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return bool(Console().is_jupyter)


class NotebookTracker:
    """Shows a progress bar, the metrics of the last steps, and messages."""

    def __init__(self, *, max_steps: int) -> None:
        self._max_steps = max_steps
        self._step = 0
        self._rows: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=NUM_SHOWN_STEPS)
        self._held_out: dict[int, dict[str, float]] = {}
        self._messages: deque[str] = deque(maxlen=NUM_SHOWN_MESSAGES)
        self._completions = ""
        self._handle: Any = None

    def begin(self, *, step: int) -> None:
        """Show the bar, starting after `step`."""
        from IPython.display import HTML, display

        self._step = step
        self._handle = display(HTML(self.as_html()), display_id=True)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step, and those of an evaluation."""
        held_out = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if held_out:
            self._held_out[step] = short_labels(held_out)
        if "loss" in metrics or "grad_norm" in metrics:
            self._step = step
            self._rows.append((step, metrics))
        self._update()

    def log_completions(self, step: int, rollouts: Sequence[Rollout], record: StepRecord) -> None:
        """Show some completions with their rewards."""
        rows = completion_rows(rollouts[:NUM_SHOWN_COMPLETIONS], record)
        self._completions = f"<p>Completions of step {step}</p>" + html_table(
            COMPLETION_COLUMNS, [[_cell(value) for value in row] for row in rows]
        )
        self._update()

    def rewind(self, step: int) -> None:
        """Set the bar back."""
        self._step = step
        self._update()

    def log_message(self, step: int, message: str) -> None:
        """Show a message under the table."""
        self._messages.append(f"Step {step} | {message}")
        self._update()

    def close(self) -> None:
        """Leave the last state on the page."""
        self._update()

    def as_html(self) -> str:
        """Return the bar, the metrics and the messages; all text is escaped."""
        names = [
            (label, key) for label, key in LINE_METRICS if any(key in m for _, m in self._rows)
        ]
        steps = html_table(
            ["Step", *(label for label, _ in names)],
            [[str(step), *(_cell(m.get(key)) for _, key in names)] for step, m in self._rows],
        )
        held_out = "".join(
            f"<p>Step {step} | Held out | "
            f"{escape(' | '.join(f'{name}: {value:.3f}' for name, value in values.items()))}</p>"
            for step, values in self._held_out.items()
        )
        messages = "".join(f"<p>{escape(message)}</p>" for message in self._messages)
        bar = f'<progress value="{self._step}" max="{self._max_steps}"></progress>'
        count = f"<p>{bar} {self._step} of {self._max_steps} steps</p>"
        return f"<div>{count}{steps}{held_out}{messages}{self._completions}</div>"

    def _update(self) -> None:
        if self._handle is not None:
            from IPython.display import HTML

            self._handle.update(HTML(self.as_html()))


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of HTML; all cells are escaped."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.4f}"
