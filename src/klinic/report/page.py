"""The page: one file that asks nobody for anything, and obeys nothing that it quotes."""

import base64
import difflib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from klinic import __version__
from klinic.doctor.diagnosis import Status
from klinic.report.heat import HeatStep, largest
from klinic.report.pictures import LETTERS, curves, gap_lanes, rewards_and_positions
from klinic.report.reading import Story

ORDER = (Status.CONFIRMED, Status.EXPLAINED, Status.UNDECIDED, Status.RULED_OUT)


def render(stories: Sequence[Story]) -> str:
    """Return the page of a run, or of two beside one another."""
    script, style = (_file(name) for name in ("heat.js", "page.css"))
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_file("page.html.jinja")).render(
        stories=[_content(s, letter) for s, letter in zip(stories, LETTERS, strict=False)],
        title=" and ".join(story.name for story in stories),
        version=__version__,
        curves=curves(stories),
        changes=_changes(stories),
        data=_embedded([_heat(story) for story in stories]),
        script=script,
        style=style,
        policy=_policy(script),
    )


def _content(story: Story, letter: str) -> dict[str, Any]:
    found = story.diagnosis
    hypotheses = sorted(
        found.hypotheses, key=lambda h: (ORDER.index(h.status), h.check.stage, h.check.name)
    )
    return {
        "story": story,
        "letter": letter,
        "diagnosis": found,
        "hypotheses": hypotheses,
        "lanes": gap_lanes(story),
        "parts": rewards_and_positions(story),
    }


def _heat(story: Story) -> dict[str, Any]:
    """Return the heat map as the script reads it: columns, so that names are not repeated."""
    return {"largest": largest(story.heat), "steps": [_heat_step(step) for step in story.heat]}


def _heat_step(step: HeatStep) -> dict[str, Any]:
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


def _embedded(value: Any) -> str:
    """Return JSON for a script element, in ASCII: nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(script: str) -> str:
    """Return a content security policy that knows this page's own script and no other."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # the pictures carry style attributes; they cannot fetch anything under default-src 'none'
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _changes(stories: Sequence[Story]) -> list[str]:
    """Return how the recipe of the second run differs from that of the first."""
    if len(stories) < 2:
        return []
    first, second = (story.recipe.splitlines() for story in stories)
    lines = difflib.unified_diff(first, second, n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def _file(name: str) -> str:
    return files("klinic.report").joinpath(name).read_text()
