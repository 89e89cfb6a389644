"""The HTML report: one self-contained file that makes no requests and escapes all quoted text."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from klinic import __version__
from klinic.doctor.diagnosis import Status
from klinic.errors import ConfigError
from klinic.evidence.numbers import as_step
from klinic.recipe import yaml_text
from klinic.recipe.keys import flatten_settings
from klinic.report.logp_gaps import subsample_steps
from klinic.report.pictures import (
    LETTERS,
    Scale,
    curves_svg,
    gap_lanes,
    rewards_and_positions,
    scale_of,
)
from klinic.report.reading import RunReport
from klinic.report.timeline_events import KINDS
from klinic.report.token_heatmap import HeatmapStep, colour_limit
from klinic.runtime.terminal_text import escape_for_terminal

PATH_KEYS = ("output.dir",)  # keys that differ between any two runs
LONGEST_VALUE = 200
LONGEST_EVENT = 600
MAX_DATA_CHARS = 1_200_000  # characters of heat-map data: with pictures and text, two megabytes
HEAT, LIVE = "heat.js", "live.js"
ORDER = (Status.CONFIRMED, Status.EXPLAINED, Status.UNDECIDED, Status.RULED_OUT)


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
    scale = scale_of(stories)
    return _make_template(_read_asset("page.html.jinja")).render(
        stories=[
            _run_content(s, letter, scale) for s, letter in zip(stories, LETTERS, strict=False)
        ],
        kinds=[kind for name, kind in KINDS.items() if name in _kinds_shown(stories)],
        title=" and ".join(story.name for story in stories),
        klinic=__version__,
        live=version,
        live_script=_read_asset(LIVE),
        curves=curves_svg(stories),
        changes=_recipe_changes(stories),
        data=_heat_data(stories),
        script=_read_asset(HEAT),
        style=_read_asset("page.css"),
        policy=content_policy(live=bool(version)),
    )


def render_waiting(says: str, version: str) -> str:
    """Return the placeholder page of a run that cannot be shown yet, with the reason."""
    return _make_template(WAITING).render(
        says=says, live=version, live_script=_read_asset(LIVE), style=_read_asset("page.css")
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
    return environment.from_string(text)


def _escape_value(value: Any) -> Any:
    return escape_for_terminal(value, keep="\n\t") if type(value) is str else value


def _run_content(story: RunReport, letter: str, scale: Scale) -> dict[str, Any]:
    diagnosis = story.diagnosis
    hypotheses = sorted(
        diagnosis.hypotheses, key=lambda h: (ORDER.index(h.status), h.check.stage, h.check.name)
    )
    # the cause itself is shown above
    left = [
        h for h in hypotheses if h.status != Status.RULED_OUT and h.check.name != diagnosis.cause
    ]
    return {
        "story": story,
        "letter": letter,
        "diagnosis": diagnosis,
        "hypotheses": hypotheses,
        "looked": [(True, left), (False, diagnosis.with_status(Status.RULED_OUT))],
        "lanes": gap_lanes(story, scale),
        "events": [_event_text(event) for event in story.events.last],
        "parts": rewards_and_positions(story, scale),
    }


def _event_text(event: Mapping[str, Any]) -> str:
    step, says = as_step(event.get("step")), event.get("says", event.get("problem"))
    where = "" if step is None else f"step {step}: "
    what = f"{event.get('event', '?')}"[:LONGEST_VALUE]
    return where + what + ("" if says is None else f": {says}"[:LONGEST_EVENT])


def _kinds_shown(stories: Sequence[RunReport]) -> set[str]:
    return {mark.kind for story in stories for mark in story.marks}


def _heat_data(stories: Sequence[RunReport]) -> str:
    """Return the heat maps as JSON for the script, with fewer steps if they are too large."""
    num = max(len(story.heat) for story in stories)
    scale = colour_limit([step for story in stories for step in story.heat])  # one scale for both
    while True:
        heats = [[s.heat[i] for i in subsample_steps(range(len(s.heat)), num)] for s in stories]
        data = _embed_json(
            [{"largest": scale, "steps": [_heat_step(step) for step in heat]} for heat in heats]
        )
        if len(data) <= MAX_DATA_CHARS or num <= 2:
            return data
        num = max(2, num * MAX_DATA_CHARS // len(data))


def _heat_step(step: HeatmapStep) -> dict[str, Any]:
    """Return a step in columns, which avoids repeating the field names."""
    return {
        "step": step.step,
        "numOwners": step.num_owners,
        "numTokens": step.num_tokens,
        "owners": [asdict(owner) for owner in step.owners],
        "completions": [
            {
                "row": one.row,
                "prompt": one.prompt,
                "reward": one.reward,
                "hidden": one.num_hidden,
                "text": [token.text for token in one.tokens],
                "kl": [token.kl for token in one.tokens],
                "sampler": [token.sampler for token in one.tokens],
                "logp": [token.logp for token in one.tokens],
                "logpSampler": [token.logp_sampler for token in one.tokens],
                "logpRef": [token.logp_ref for token in one.tokens],
                "trained": [int(token.trained) for token in one.tokens],
            }
            for one in step.completions
        ],
    }


def _embed_json(value: Any) -> str:
    """Return ASCII JSON for a script element; no content can close the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def content_policy(*, live: bool = True) -> str:
    """Return a content security policy that allows only this page's own scripts."""
    scripts = [_read_asset(name) for name in ((HEAT, LIVE) if live else (HEAT,))]
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    # the SVGs have style attributes; default-src 'none' keeps them from fetching anything
    policy = (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return f"{policy}; connect-src 'self'" if live else policy


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


def _parse_recipe(story: RunReport) -> Any:
    try:
        return yaml_text.parse_yaml(story.recipe, where=story.name)
    except ConfigError:
        return {"recipe": "cannot be read"}


def _format_value(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)[:LONGEST_VALUE]


def _read_asset(name: str) -> str:
    return files("klinic.report").joinpath(name).read_text()
