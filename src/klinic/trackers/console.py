"""Console tracker: a live display in a terminal, one line per step elsewhere."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import Prompt, Rollout
from klinic.runtime.terminal_text import escape_for_terminal
from klinic.trackers.held_out import HeldOutTable

NUM_SHOWN_COMPLETIONS = 8  # completions in a table
MAX_CELL_CHARACTERS = 60  # characters of a prompt or a completion in it
LINE_METRICS = (
    ("Loss", "loss"),
    ("Grad norm", "grad_norm"),
    ("Reward", "reward"),
    ("KL", "kl"),
    ("KL penalty", "kl_penalty"),
    ("KL to teacher", "teacher/kl"),
)


class ConsoleTracker:
    """Progress, metrics and held-out values, live in a terminal; plain lines elsewhere."""

    def __init__(self, console: Console, *, max_steps: int) -> None:
        self._console = console
        self._live: Live | None = None
        self._bar = _make_progress_bar(console)
        self._task = self._bar.add_task("", total=max_steps)
        self._metrics: list[str] = []
        self._held_out = HeldOutTable()

    def __rich__(self) -> Group:
        width = self._console.width
        return Group(self._bar, *wrap_parts(self._metrics, width), *self._held_out.lines(width))

    def begin(self, *, step: int) -> None:
        """Show the display, starting after `step`."""
        self._bar.update(self._task, completed=step)
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=4)
            self._live.start()

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step, and those of an evaluation on a separate line."""
        evaluation = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if "loss" in metrics or "grad_norm" in metrics:
            self._bar.update(self._task, completed=step)
            self._metrics = step_parts(step, metrics)
            self._print_outside_terminal(" | ".join(self._metrics))
        if evaluation:
            values = short_labels(evaluation)
            self._held_out.add(step, values)
            parts = [f"{name}: {value:.3f}" for name, value in values.items()]
            self._print_outside_terminal(" | ".join([f"Step {step}", "Held out", *parts]))

    def _print_outside_terminal(self, line: str) -> None:
        if self._live is None:
            shown = escape_for_terminal(line)
            self._console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def log_completions(self, step: int, rollouts: Sequence[Rollout], record: StepRecord) -> None:
        """Show some completions with their rewards."""
        table = Table(title=f"Step {step}: completions", title_justify="left", box=box.SIMPLE_HEAD)
        for column in ("prompt", "completion", "ended by", "reward", "advantage"):
            table.add_column(
                column, justify="right" if column in {"reward", "advantage"} else "left"
            )
        for row, rollout in enumerate(rollouts[:NUM_SHOWN_COMPLETIONS]):
            table.add_row(
                Text(printable_cell(_prompt_text(rollout.prompt))),
                Text(printable_cell(rollout.text)),
                rollout.finish_reason,
                "" if record.reward is None else f"{record.reward[row]:.3f}",
                "" if record.advantage is None else f"{record.advantage[row]:+.3f}",
            )
        self._console.print(table)

    def rewind(self, step: int) -> None:
        """Set the display back."""
        self._bar.update(self._task, completed=step)
        self._held_out.rewind(step)

    def log_message(self, step: int, message: str) -> None:
        """Print the message on a separate line."""
        text = Text(f"Step {step} | {message}", style="yellow")
        self._console.print(text, highlight=False, soft_wrap=not self._console.is_terminal)

    def close(self) -> None:
        """Stop updating the display."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _prompt_text(prompt: Prompt) -> str:
    """Return the text of a prompt: of a chat, the last message."""
    if prompt.messages is None:
        return prompt.text
    return str(prompt.messages[-1].get("content", ""))


class WarmStartProgress:
    """Progress bar with the remaining time in a terminal; a line for every tenth elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None

    def __enter__(self) -> "WarmStartProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show_progress(self, step: int, total: int, loss: float) -> None:
        """Show the progress."""
        text = f"Warm start | Loss: {loss:.4f}"
        if not self._console.is_terminal:
            if step % max(1, total // 10) == 0 or step == total:
                self._console.print(f"Warm start {step}/{total} | Loss: {loss:.4f}")
            return
        if self._bar is None:
            self._bar = _make_progress_bar(self._console)
            self._task = self._bar.add_task(text, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=step, description=text)


def _make_progress_bar(console: Console) -> Progress:
    # the remaining time first: a narrow terminal truncates the end
    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=10),
        TimeRemainingColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=console,
    )


def step_parts(step: int, metrics: Mapping[str, float]) -> list[str]:
    """Return the metrics of a step, each with its label; missing ones are left out.

    >>> step_parts(1, {"loss": 0.1234, "grad_norm": 0.5678, "kl_penalty": 0.0012})
    ['Step 1', 'Loss: 0.1234', 'Grad norm: 0.5678', 'KL penalty: 0.0012']
    """
    # + 0.0: no minus sign of a value that rounds to 0
    values = [
        f"{label}: {round(metrics[name], 4) + 0.0:.4f}"
        for label, name in LINE_METRICS
        if name in metrics
    ]
    return [f"Step {step}", *values]


def wrap_parts(parts: Sequence[str], width: int) -> list[Text]:
    """Return the parts in as many lines as they need; no part is broken.

    >>> [str(line) for line in wrap_parts(["Step 1", "Loss: 0.1234", "Reward: 0.5"], 25)]
    ['Step 1 | Loss: 0.1234', 'Reward: 0.5']
    """
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]} | {part}" if lines else part
        if lines and len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return [Text(line, no_wrap=True, overflow="crop") for line in lines]


def short_labels(evaluation: Mapping[str, float]) -> dict[str, float]:
    """Return held-out metrics under short names; the trained skill is not repeated.

    >>> short_labels({"eval/accuracy": 0.5, "eval/accuracy/addition": 0.5, "eval/retention": 1.0})
    {'addition': 0.5, 'retention': 1.0}
    """
    by_skill = any(name.startswith("eval/accuracy/") for name in evaluation)
    return {
        name.removeprefix("eval/").removeprefix("accuracy/").removeprefix("rewards/"): value
        for name, value in evaluation.items()
        if not (by_skill and name == "eval/accuracy")
    }


def printable_cell(text: str) -> str:
    """Escape control characters in untrusted text and truncate it.

    >>> printable_cell("[red]a" + chr(27) + "[2J")
    '[red]a\\\\x1b[2J'
    """
    escaped = escape_for_terminal(text)
    return (
        escaped
        if len(escaped) <= MAX_CELL_CHARACTERS
        else escaped[: MAX_CELL_CHARACTERS - 3] + "..."
    )
