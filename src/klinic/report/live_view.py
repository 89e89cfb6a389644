"""Renders a run snapshot as text: a screen for a terminal, or one line per step for a pipe.

Content that does not fit is dropped, least urgent first. All quoted text is escaped.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from klinic.evidence.numbers import as_number, as_step
from klinic.evidence.warm_start_status import WarmStartStatus
from klinic.report.live import Phase, RunSnapshot, seconds_of, tokens_per_second
from klinic.report.logp_gaps import LANES
from klinic.report.terminal import completion_text, has_colours, shade
from klinic.report.token_heatmap import colour_limit
from klinic.runtime.terminal_text import escape_for_terminal

BARS = "▁▂▃▄▅▆▇█"
NOT_A_NUMBER = "!"
MAX_EVENTS = 5
LONGEST_EVENT, LONGEST_NAME = 2_000, 100  # characters
WIDEST_BAR = 30
WARM_START_BAR = 10
LABEL, VALUE = 11, 10  # columns
METRICS = (
    ("reward", "reward"),
    ("KL/token", "kl"),
    ("grad norm", "grad_norm"),
    ("clipped", "clip_ratio/region_mean"),
    ("entropy", "entropy"),
    ("length", "completions/mean_length"),
    ("tokens/s", "tokens/s"),
)
VERDICT_LINES, EVENT_LINES = 6, 3  # lines of one sentence
INDENT, CUT = "   ", " ..."
PHASE_TEXT = {
    Phase.WAITING: "no files written yet",
    Phase.GONE: "no process is training here: killed or stopped, not resumed yet",
    Phase.PAUSED: "stopped by a signal, checkpoint saved, not resumed yet",
    Phase.STOPPED: "the run stopped itself",
    Phase.ENDED: "the run has ended",
}


def render_screen(snapshot: RunSnapshot, console: Console, height: int | None = None) -> list[Text]:
    """Return the lines of a terminal screen, cut to its width and height."""
    width, height = max(1, console.width), max(1, height or console.height)
    top = [_headline_text(snapshot, width)]
    parts = [
        *((0, [line]) for line in _status_lines(snapshot)),
        (1, _metric_lines(snapshot, width)),
        (3, _gap_lines(snapshot, width)),
        (2, _wrap_sentence(_verdict_text(snapshot), console, most=VERDICT_LINES)),
        (4, _event_lines(snapshot, console)),
    ]
    room = height - len(top)
    chosen = _fit_sections(parts, room)
    shown = [line for lines in chosen for line in lines]
    heat = _heat_lines(snapshot, console, most=room - len(shown))
    every = [*top, *shown, *heat][:height]
    for line in every:
        line.no_wrap, line.overflow = True, "crop"
        line.truncate(width)
    return every


def step_line(metrics: Mapping[str, Any], max_steps: int | None) -> str:
    """Return the line of a step, without metrics that were not measured.

    >>> step_line({"step": 2, "reward": 0.5, "kl": None, "eval/accuracy": 1.0}, 9)
    'step 2 of 9 | reward 0.5 | KL/token nan | accuracy 1'
    """
    measured = [
        (label, number)
        for label, name in METRICS
        if (number := metric_value(metrics, name)) is not None
    ]
    parts = [f"{label} {_format_number(number)}" for label, number in measured]
    if "kl_coef" in metrics:
        parts.append(f"kl_coef {_format_number(as_number(metrics['kl_coef']))}")
    parts += [
        (
            f"{escape_for_terminal(name.removeprefix('eval/')[:LONGEST_NAME])} "
            f"{_format_number(as_number(number))}"
        )
        for name, number in metrics.items()
        if name.startswith("eval/")
    ]
    of = f" of {max_steps}" if max_steps is not None and metrics["step"] <= max_steps else ""
    return " | ".join([f"step {metrics['step']}{of}", *parts])


def event_line(event: Mapping[str, Any]) -> str:
    """Return an event as one line.

    The name of the event is left out where its sentence has the same words.

    >>> event_line({"step": 3, "event": "reference", "says": "Reference: moved."})
    'step 3: Reference: moved.'
    >>> event_line({"step": 3, "event": "trouble", "says": "The loss is NaN."})
    'step 3: trouble: The loss is NaN.'
    """
    step = as_step(event.get("step"))
    where = f"step {step}: " if step is not None else ""
    says = str(event.get("says", event.get("problem", "")))
    name = str(event.get("event", "?"))
    shown = [says] if _has_words(says, name) else [name, *([says] if says else [])]
    text = where + ": ".join(shown)
    return escape_for_terminal(text[:LONGEST_EVENT])[:LONGEST_EVENT]


def _has_words(sentence: str, name: str) -> bool:
    return set(name.lower().split()) <= set(re.findall(r"\w+", sentence.lower()))


def phase_line(snapshot: RunSnapshot) -> str:
    """Return the state of the run as a sentence with its last step."""
    sentence = (
        f"{escape_for_terminal(snapshot.run)}: "
        f"{PHASE_TEXT.get(snapshot.phase, 'the run is in progress')}"
    )
    return f"{sentence}, after step {snapshot.step}." if snapshot.steps else f"{sentence}."


def metric_value(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a metric of a step: NaN if it is not finite, None if it was not measured."""
    if name == "tokens/s":
        return tokens_per_second(metrics)
    if name == "clip_ratio/region_mean" and name not in metrics:
        name = "clip_ratio"  # the name that other trainers use
    if name not in metrics:
        return None
    number = as_number(metrics[name])
    return number if number is not None and math.isfinite(number) else math.nan


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return values as bars scaled from minimum to maximum, the newest at the right.

    >>> sparkline([0.0, 1.0, 2.0, None, float("nan"), 7.0], 6)
    '▁▂▃ !█'
    """
    shown = list(values)[-width:] if width > 0 else []
    finite = [v for v in shown if v is not None and math.isfinite(v)]
    if not finite:
        return "".join(" " if v is None else NOT_A_NUMBER for v in shown)
    low, high = min(finite), max(finite)
    return "".join(_bar_char(v, low, high) for v in shown)


def _bar_char(number: float | None, low: float, high: float) -> str:
    if number is None:
        return " "
    if not math.isfinite(number):
        return NOT_A_NUMBER
    # halved, since the difference of two floats may overflow
    fraction = (number / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.0
    return BARS[round(fraction * (len(BARS) - 1))]


def _fit_sections(parts: Iterable[tuple[int, list[Text]]], room: int) -> list[list[Text]]:
    """Return the sections in order, without the least urgent lines that do not fit."""
    sections = list(parts)
    while sections and sum(len(lines) for _, lines in sections) > room:
        urgency = max(urgency for urgency, _ in sections)
        index = max(i for i, (u, _) in enumerate(sections) if u == urgency)
        lines = sections[index][1][:-1]  # drop line by line: part of a section is better than none
        sections[index : index + 1] = [(urgency, lines)] if lines else []
    return [lines for _, lines in sections]


def _headline_text(snapshot: RunSnapshot, width: int) -> Text:
    of = (
        ""
        if snapshot.max_steps is None or snapshot.step > snapshot.max_steps
        else f" of {snapshot.max_steps}"
    )
    left = snapshot.seconds_left
    title = f" step {snapshot.step}{of} "
    rest = "" if left is None else f" {format_duration(left)} left"
    bar = min(WIDEST_BAR, width - len(title) - len(rest) - 12)
    text = Text(title, style="bold")
    if of and snapshot.max_steps and bar >= 5:
        done = round(bar * snapshot.step / snapshot.max_steps)
        text.append("█" * done, style="green").append("░" * (bar - done), style="dim")
    text.append(rest)
    name = escape_for_terminal(snapshot.run)
    room = width - text.cell_len - 1
    return text.append(f" {name if len(name) <= room else '…' + name[-max(0, room - 1) :]}", "dim")


def format_duration(seconds: float) -> str:
    """Return seconds as minutes and hours.

    >>> format_duration(59.6), format_duration(3725.0), format_duration(200000.0)
    ('1:00', '1:02:05', '55:33:20')
    """
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _status_lines(snapshot: RunSnapshot) -> list[Text]:
    """Return status and warning lines, most urgent first."""
    lines = []
    if snapshot.phase != Phase.GOING:
        lines.append(Text(f" {PHASE_TEXT[snapshot.phase]}", style="bold yellow"))
    elif not snapshot.steps and snapshot.warm_start is None:
        lines.append(Text(" no step yet: the run is starting", style="yellow"))
    if snapshot.warm_start is not None:
        lines.append(_warm_start_text(snapshot.warm_start))
    if snapshot.num_damaged:
        lines.append(Text(f" {snapshot.num_damaged} lines of metrics cannot be read", style="red"))
    if snapshot.problem:
        lines.append(Text(f" {escape_for_terminal(snapshot.problem)}", style="red"))
    return lines


def warm_start_line(status: WarmStartStatus) -> str:
    """Return the progress of a warm start as one line.

    >>> warm_start_line(WarmStartStatus(step=90, num_steps=900, loss=0.4, seconds=10.0))
    'warm start 90 of 900 | loss 0.4 | 1:30 left'
    """
    parts = [f"warm start {status.step} of {status.num_steps}"]
    if status.loss is not None:
        parts.append(f"loss {_format_number(status.loss)}")
    if status.seconds_left is not None:
        parts.append(f"{format_duration(status.seconds_left)} left")
    return " | ".join(parts)


def _warm_start_text(status: WarmStartStatus) -> Text:
    done = round(WARM_START_BAR * status.step / max(1, status.num_steps))
    bar = Text(" ").append("█" * done, style="green")
    bar.append("░" * (WARM_START_BAR - done), style="dim")
    return bar.append(f" {warm_start_line(status)}", style="yellow")


def _metric_lines(snapshot: RunSnapshot, width: int) -> list[Text]:
    lines = []
    for label, name in METRICS:
        values = [
            metric_value(step, name)
            for step in snapshot.steps
            if seconds_of(step) or _has_metric(step, name)
        ]
        if all(v is None for v in values):
            continue
        newest = next(v for v in reversed(values) if v is not None)
        text = Text(f" {label:<{LABEL}}").append(f"{_format_number(newest):>{VALUE}}", style="bold")
        if name == "kl":
            text.append(_target_text(snapshot), style="dim")
        text.append("  ").append(sparkline(values, width - text.cell_len), style="cyan")
        lines.append(text)
    return lines


def _target_text(snapshot: RunSnapshot) -> str:
    newest = snapshot.steps[-1]
    target, coef = (as_number(newest.get(name)) for name in ("kl_target", "kl_coef"))
    parts = [f"target {target:g}"] if target is not None else []
    parts += [f"coef {coef:.3g}"] if coef is not None else []
    return f" ({', '.join(parts)})" if parts else ""


def _gap_lines(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the log-prob gaps by recorded step, in the shades of the report."""
    lines = []
    for lane in LANES:
        sizes = [gaps.sizes[lane] for gaps in snapshot.gaps]
        if not sizes or all(map(math.isnan, sizes)):
            continue
        name = "update" if lane == "update" else f"- {lane}"
        text = Text(f" {name:<{LABEL}}").append(
            f"{_format_number(sizes[-1]):>{VALUE}}", style="bold"
        )
        text.append(" nats ", style="dim")
        room = max(0, width - text.cell_len)
        lines.append(text.append("".join(map(shade, sizes[-room:] if room else []))))
    return lines


def _verdict_text(snapshot: RunSnapshot) -> Text:
    if snapshot.verdict is not None:
        return Text(f" {escape_for_terminal(snapshot.verdict)}", style="bold red")
    return Text(" Doctor: no cause named so far." if snapshot.steps else "", style="green")


def _event_lines(snapshot: RunSnapshot, console: Console) -> list[Text]:
    """Return the newest events, the newest first."""
    events = [e for e in snapshot.events if e.get("event") != "diagnosis"]
    return [
        line
        for event in reversed(events[-MAX_EVENTS:])
        for line in _wrap_sentence(
            Text(f" {event_line(event)}", style="yellow"), console, most=EVENT_LINES
        )
    ]


def _heat_lines(snapshot: RunSnapshot, console: Console, *, most: int) -> list[Text]:
    """Return as many lines of the newest recorded completions as fit."""
    heat = snapshot.heat
    if heat is None or most < 2:
        return []
    lines = [Text(f" step {heat.step}, KL token by token", style="dim")]
    scale = colour_limit([heat])
    for completion in heat.completions:
        text = completion_text(completion, scale, colours=has_colours(console))
        lines += _wrap_text(text, console, most=most - len(lines))
        if len(lines) >= most:
            break
    return lines


def _wrap_sentence(text: Text, console: Console, *, most: int) -> list[Text]:
    """Return a sentence wrapped between words, further lines indented; "..." where it is cut."""
    if not text.plain:
        return []
    lines = list(text.wrap(console, max(1, console.width - len(INDENT) - len(CUT))))
    shown = [
        Text(INDENT if number else "").append(line) for number, line in enumerate(lines[:most])
    ]
    for line in shown:
        line.rstrip()
    if len(lines) > most:
        shown[-1].append(CUT, style=text.style)
    return shown


def _wrap_text(text: Text, console: Console, *, most: int) -> list[Text]:
    if not text.plain:
        return []
    return list(text.wrap(console, max(1, console.width), overflow="fold"))[: max(0, most)]


def _has_metric(metrics: Mapping[str, Any], name: str) -> bool:
    return metric_value(metrics, name) is not None


def _format_number(number: float | None) -> str:
    if number is None or not math.isfinite(number):
        return "nan"
    return f"{number:.4g}"
