"""Writes the self-contained HTML page of an ablation."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from klinic.evidence.writing import write_atomically
from klinic.lab.ablation.comparison import COMPARED, SettingRow, num_tests
from klinic.lab.ablation.intervals import CONFIDENCE, Difference, Interval
from klinic.lab.ablation.measures import MEASURES, SCORE, Measure
from klinic.lab.ablation.verdict import Verdict

PAGE = "index.html"
CONDITION = (
    "A warm start or a named model gives the same initial weights to every seed, and all trials "
    "have the same held-out questions: the intervals hold for this start and these questions, and "
    "contain no noise of others. With several starts (--starts) they are intervals over starts, "
    "from the means of each."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContent:
    """The data of the page."""

    title: str
    command: str
    rows: Sequence[SettingRow]
    verdict: Verdict
    failures: Sequence[tuple[str, str]]
    baseline: str


def write_page(folder: Path, content: PageContent, pictures: Sequence[Path]) -> Path:
    """Write the page and return its path."""
    # autoescape: settings and failures are untrusted text
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(
        files("klinic.lab.ablation").joinpath("page.html.jinja").read_text()
    )
    text = template.render(
        page=content,
        measures=_measured(content.rows, MEASURES),
        described=(*MEASURES, SCORE),
        condition=CONDITION,
        compared=[
            measure
            for measure in _measured(content.rows, (*MEASURES, SCORE))
            if measure.name in COMPARED
        ],
        lines=_split_cell,
        num_tests=num_tests(content.rows),
        shown=format_mean,
        signed=format_difference,
        noise=classify_noise,
        pictures=[_data_uri(path) for path in pictures],
    )
    path = folder / PAGE
    write_atomically(path, text.encode("utf-8", "backslashreplace"))
    return path


def _measured(rows: Sequence[SettingRow], measures: Sequence[Measure]) -> list[Measure]:
    """Return the measures that any setting has: an empty column would push others off the page."""
    return [
        measure
        for measure in measures
        if any(not math.isnan(row.means[measure.name].mean) for row in rows)
    ]


def _split_cell(text: str, second: str) -> Markup:
    """Return a cell of two lines, the second from this separator on.

    >>> _split_cell("0.842 ± 0.040", " ±")
    Markup('0.842<small>± 0.040</small>')
    """
    head, separator, rest = text.partition(second)
    if not separator:
        return Markup("{}").format(text)
    return Markup("{}<small>{}</small>").format(head, separator.strip() + rest)


def format_mean(value: Interval) -> str:
    """Format a mean with half its interval, with few digits.

    >>> format_mean(Interval(mean=0.8421, low=0.8, high=0.88, num=3))
    '0.842 ± 0.040'
    >>> format_mean(Interval(mean=15312.0, low=math.nan, high=math.nan, num=1))
    '15312'
    """
    if math.isnan(value.mean):
        return ""
    digits = 0 if abs(value.mean) >= 1000 else 1 if abs(value.mean) >= 100 else 3
    if 0 < abs(value.mean) < 0.1:
        digits = 4
    text = f"{value.mean:.{digits}f}"
    return text if math.isnan(value.half_width) else f"{text} ± {value.half_width:.{digits}f}"


def format_difference(value: Interval) -> str:
    """Format a difference with its interval.

    >>> format_difference(Interval(mean=0.02, low=-0.01, high=0.05, num=3))
    '+0.0200 (-0.0100 to +0.0500)'
    """
    if math.isnan(value.mean):
        return ""
    if math.isnan(value.half_width):
        return f"{value.mean:+.4f}"
    return f"{value.mean:+.4f} ({value.low:+.4f} to {value.high:+.4f})"


def classify_noise(value: Difference) -> str:
    """Classify a difference as within or beyond noise, by its corrected p-value.

    >>> base = {"mean": 0.02, "low": 0.01, "high": 0.03, "num": 3, "p_value": 0.01}
    >>> classify_noise(Difference(**base, standard_error=0.002, p_corrected=0.12))
    'within noise'
    """
    if not value.num:
        return "no pair of seeds"
    if value.num > 1 and math.isnan(value.p_value):
        return "not tested"
    if value.num == 1:
        return "(one seed)"
    if value.p_outside_corrected < 1 - CONFIDENCE:
        return "equivalent"
    return "beyond noise" if value.is_significant else "within noise"


def _data_uri(path: Path) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()
