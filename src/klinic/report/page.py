"""The HTML report: one self-contained file that makes no requests and escapes all quoted text."""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from klinic import __version__
from klinic.errors import ConfigError
from klinic.evidence.numbers import as_step
from klinic.recipe import yaml_text
from klinic.recipe.keys import flatten_settings
from klinic.report.cause_rows import IN_NO_COMPLETION
from klinic.report.page_data import encode_page_data
from klinic.report.reading import RunReport
from klinic.report.timeline_events import KINDS
from klinic.report.verdict_card import certainty
from klinic.runtime.terminal_text import escape_for_terminal

LETTERS = "AB"  # short names of two compared runs
PATH_KEYS = ("output.dir",)  # keys that differ between any two runs
COEFFICIENT = "kl_coef"
LONGEST_VALUE = 200
SAME = 1e-9  # difference of two metrics that is rounding
LONGEST_EVENT = 600
CHARTS = "vendor/uPlot.iife.min.js"
SCRIPTS = (CHARTS, "text.js", "charts.js", "lanes.js", "tokens.js", "page.js")
STYLES = ("vendor/uPlot.min.css", "page.css")
LIVE = "live.js"

WAITING = """<!doctype html>
<html lang="en" data-version="{{ live }}">
<meta charset="utf-8"><title>klinic</title><style>{{ style | safe }}</style>
<h1>Nothing to show yet</h1><p>{{ says }}</p><p class="live" id="live" role="status"></p>
<script>{{ live_script | safe }}</script>
"""


def render(stories: Sequence[RunReport], version: str = "") -> str:
    """Return the page of one run, or of two for comparison.

    With a `version`, the page polls its server for a newer version.
    """
    runs = [_run_content(s, letter) for s, letter in zip(stories, LETTERS, strict=False)]
    parting = _find_parting(stories)
    return _make_template(_read_asset("page.html.jinja")).render(
        runs=runs,
        kinds=[kind for name, kind in KINDS.items() if name in _kinds_shown(stories)],
        title=" and ".join(story.name for story in stories),
        klinic=__version__,
        live=version,
        live_script=_read_asset(LIVE),
        has_lanes=any(story.lanes for story in stories),
        has_tokens=any(story.tokens for story in stories),
        changes=_recipe_changes(stories),
        parting=parting,
        data=encode_page_data(stories, None if parting is None else parting[0]),
        script=_page_script(),
        style=_page_style(),
        policy=content_policy(live=bool(version)),
    )


def render_waiting(says: str, version: str) -> str:
    """Return the placeholder page of a run that cannot be shown yet, with the reason."""
    return _make_template(WAITING).render(
        says=says, live=version, live_script=_read_asset(LIVE), style=_page_style()
    )


def _make_template(text: str) -> Template:
    """Return a template that HTML-escapes every value and replaces control characters."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_escape_value,
    )
    environment.filters["certainty"] = certainty
    environment.filters["code_spans"] = _code_spans
    environment.filters["line_ends"] = _show_line_ends
    environment.globals["in_no_completion"] = IN_NO_COMPLETION
    return environment.from_string(text)


def _escape_value(value: Any) -> Any:
    return escape_for_terminal(value, keep="\n\t") if type(value) is str else value


def _code_spans(text: str) -> Markup:
    """Return escaped text with its backticked parts as code.

    >>> _code_spans("set `a<b`")
    Markup('set <code>a&lt;b</code>')
    """
    parts = escape_for_terminal(text, keep="\n\t").split("`")
    if len(parts) % 2 == 0:  # an odd backtick
        return escape("`".join(parts))
    return Markup().join(
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part)
        for i, part in enumerate(parts)
    )


def _show_line_ends(text: str) -> str:
    """Return a text with a sign at every line end; tokens.js shows the same."""
    return text.replace("\n", "\u21b5\n")


def _run_content(story: RunReport, letter: str) -> dict[str, Any]:
    return {
        "story": story,
        "card": story.card,
        "letter": letter,
        "proof": None if story.proof is None else _proof_bars(story),
        "events": [_event_text(event) for event in story.events.last],
    }


def _proof_bars(story: RunReport) -> dict[str, Any]:
    """Return the proof with the lengths of two bars, in percent."""
    proof = story.proof
    assert proof is not None  # noqa: S101 - tested by the caller
    largest = max(abs(proof.before), abs(proof.after)) or 1.0
    return {
        "proof": proof,
        "bars": [
            ("as it ran", f"{proof.before:.4g}", round(100 * abs(proof.before) / largest, 1)),
            ("with the change", f"{proof.after:.4g}", round(100 * abs(proof.after) / largest, 1)),
        ],
    }


def _event_text(event: Mapping[str, Any]) -> str:
    step, says = as_step(event.get("step")), event.get("says", event.get("problem"))
    where = "" if step is None else f"step {step}: "
    what = f"{event.get('event', '?')}"[:LONGEST_VALUE]
    return where + what + ("" if says is None else f": {says}"[:LONGEST_EVENT])


def _kinds_shown(stories: Sequence[RunReport]) -> set[str]:
    return {mark.kind for story in stories for mark in story.marks}


def content_policy(*, live: bool = True) -> str:
    """Return a content security policy that allows only this page's own scripts and styles."""
    scripts = [_page_script(), _read_asset(LIVE)] if live else [_page_script()]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_digest, scripts))}; "
        f"style-src {_digest(_page_style())}; base-uri 'none'; form-action 'none'"
    )
    return f"{policy}; connect-src 'self'" if live else policy


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _page_script() -> str:
    return "\n".join(_read_asset(name) for name in SCRIPTS)


def _page_style() -> str:
    return "\n".join(_read_asset(name) for name in STYLES)


def _recipe_changes(stories: Sequence[RunReport]) -> list[tuple[str, str, str]]:
    """Return the keys in which two recipes differ, with both values."""
    if len(stories) < 2:
        return []
    first, second = (
        {key: _format_value(value) for key, value in flatten_settings(_parse_recipe(story)).items()}
        for story in stories
    )
    keys = sorted(first.keys() | second.keys())
    differing = [key for key in keys if first.get(key) != second.get(key) and key not in PATH_KEYS]
    return [(key, first.get(key, "-"), second.get(key, "-")) for key in differing]


def _find_parting(stories: Sequence[RunReport]) -> tuple[int, str, float, float] | None:
    """Return the first common step in which two runs differ: the metric, and both its values.

    The KL coefficient counts only if no other metric differs: it may be a setting.
    """
    if len(stories) < 2:
        return None
    first, second = (story.curves for story in stories)
    partings = []
    for name in (name for name in first.names if name in second.names):
        other = dict(zip(*second.series(name), strict=True))
        for step, value in zip(*first.series(name), strict=True):
            if step in other and not math.isclose(value, other[step], rel_tol=SAME, abs_tol=SAME):
                partings.append((step, name, value, other[step]))
                break
    return min(partings, key=lambda parting: (parting[1] == COEFFICIENT, parting[0]), default=None)


def _parse_recipe(story: RunReport) -> Any:
    if not story.recipe:
        return {}
    try:
        return yaml_text.parse_yaml(story.recipe, where=story.name)
    except ConfigError:
        return {"recipe": "cannot be read"}


def _format_value(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)[:LONGEST_VALUE]


def _read_asset(name: str) -> str:
    return files("klinic.report").joinpath(name).read_text(encoding="utf-8")
