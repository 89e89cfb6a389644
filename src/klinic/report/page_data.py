"""The data of a page for its scripts: curves, events, gap lanes and tokens, compressed.

JSON, deflated and base64-encoded: no content can close the element that holds it. The scripts
inflate it in the browser and put all text into the page as text, never as markup.
"""

import base64
import json
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from klinic.report.curves import PLOTTED_METRICS, MetricCurves, Series
from klinic.report.evidence_picture import gap_lane
from klinic.report.logp_gaps import MAX_NATS, GapLane, subsample_steps
from klinic.report.reading import RunReport
from klinic.report.timeline_events import KINDS, TimelineEvent
from klinic.report.token_table import LOGP_FIELDS, StepTokens

UPDATE_GAP = "Gap of the update, nats"
FRACTIONS, EQUAL_REWARDS = "Fraction of completions", "Prompts with equal rewards"
Panel = tuple[str, tuple[str, ...]]
PANELS: tuple[Panel, ...] = (
    ("Reward", ("reward", "eval/accuracy", "recorded/reward")),
    ("KL to the reference, nats", ("kl", "kl_exact/mean", "kl_k1/mean")),
    ("Policy - sampler, mean gap, nats", ("gap/sampler",)),
    ("Gradient norm", ("grad_norm", "grad_norm_clipped")),
    ("Entropy, nats per token", ("entropy",)),
    ("Length of completions, tokens", ("completions/mean_length", "recorded/length")),
    (FRACTIONS, ("completions/parse_rate", "completions/clipped_ratio")),
    (EQUAL_REWARDS, ("frac_reward_zero_std", "recorded/equal_groups")),
    ("KL coefficient", ("kl_coef",)),
    (UPDATE_GAP, ("gap/update",)),
)
"""Titles of the charts, and the curves of each."""
RECORDED_TWINS = {
    "recorded/reward": "reward",
    "recorded/length": "completions/mean_length",
    "recorded/equal_groups": "frac_reward_zero_std",
}
"""Curves measured on records that are left out if the metric of the same meaning was logged."""
FRACTION_CURVES = {
    *("recorded/trained", "recorded/equal_groups", "frac_reward_zero_std"),
    *("completions/parse_rate", "completions/clipped_ratio", "eval/accuracy"),
}
IN_OTHER_PANELS = {"gap/reference", "recorded/trained"}
LABELS = {
    "kl": "KL (k3)",
    "kl_exact/mean": "exact KL",
    "gap/sampler": "mean |policy - sampler|",
    "gap/reference": "mean |policy - reference|",
    "gap/update": "mean |after - before the update|",
    "recorded/reward": "reward (from the records)",
    "recorded/length": "mean length (from the records)",
    "recorded/trained": "fraction of tokens that are trained on",
    "recorded/equal_groups": "fraction of prompts (from the records)",
    "eval/accuracy": "held-out accuracy",
    "completions/parse_rate": "can be read",
    "completions/clipped_ratio": "cut off",
    "completions/mean_length": "mean length",
}
LANE_TITLES = {
    "update": "policy after the update - before it",
    "sampler": "policy - sampler",
    "reference": "policy - reference",
}
LEVELS = 100  # steps of a decade of a gap
MIN_NATS = 1e-7  # nats: float32 cannot resolve smaller gaps
MAX_TOKEN_DATA = 900_000  # characters of compressed tokens: the rest of a page has half a megabyte
MAX_PROFILE_POINTS = 500
MAX_LABEL = 60  # characters of a curve's name
MAX_NUM_FURTHER = 12  # charts beside the usual ones


def encode_page_data(stories: Sequence[RunReport], parting: int | None = None) -> str:
    """Return all data of a page, with fewer steps of tokens if they are too large.

    `parting` is the first step in which two runs differ.
    """
    steps = [story.tokens for story in stories]
    num = max(len(some) for some in steps)
    while True:
        keep = [_thin_tokens(s, some, num) for s, some in zip(stories, steps, strict=True)]
        tokens = pack({"runs": [_token_data(s, k) for s, k in zip(stories, keep, strict=True)]})
        if len(tokens) <= MAX_TOKEN_DATA or num <= 1:
            break
        num = max(1, min(num - 1, num * MAX_TOKEN_DATA // len(tokens)))
    if len(tokens) > MAX_TOKEN_DATA:
        tokens = pack({"runs": [_token_data(story, []) for story in stories]})
    return f"{pack({**_curve_data(stories), 'parting': parting})} {tokens}"


def pack(value: Any) -> str:
    """Return JSON, deflated, as base64.

    >>> unpack(pack({"a": [1, None]}))
    {'a': [1, None]}
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpack(text: str) -> Any:
    """Return what `pack` packed."""
    return json.loads(zlib.decompress(base64.b64decode(text)))


def _curve_data(stories: Sequence[RunReport]) -> dict[str, Any]:
    curves = [story.curves for story in stories]
    return {
        "runs": [
            {
                "name": story.name,
                "marks": [_mark_data(mark) for mark in story.marks],
                "firstStep": None if story.diagnosis is None else story.diagnosis.first_step,
                "lanes": [_lane_data(lane) for lane in story.lanes],
                "evidence": _evidence_data(story),
            }
            for story in stories
        ],
        "panels": [*_metric_panels(curves), *_reward_panel(curves), *_profile_panel(stories)],
    }


def _metric_panels(curves: Sequence[MetricCurves]) -> list[dict[str, Any]]:
    logged = list(dict.fromkeys(name for one in curves for name in one.names))
    placed = {name for _, names in PANELS for name in names} | IN_OTHER_PANELS
    further: list[Panel] = [
        (name, (name,))
        for name in logged
        if name not in placed and not name.startswith("rewards/") and name not in PLOTTED_METRICS
    ]
    panels: list[dict[str, Any]] = []
    for title, names in (*PANELS, *further[:MAX_NUM_FURTHER]):
        shown = [n for n in names if n in logged and RECORDED_TWINS.get(n) not in logged]
        if "kl" in shown:
            shown = [name for name in shown if name != "kl_k1/mean"]
        lines = [
            _line(one.downsampled_series(n), LABELS.get(n, n), run, index)
            for run, one in enumerate(curves)
            for index, n in enumerate(shown)
        ]
        unit = "fraction" if title in (FRACTIONS, EQUAL_REWARDS) else ""
        if title != UPDATE_GAP or any(value for line in lines for value in line["y"]):
            panels.append({"title": title[:MAX_LABEL], "x": "step", "unit": unit, "lines": lines})
    return [panel for panel in panels if any(line["y"] for line in panel["lines"])]


def _reward_panel(curves: Sequence[MetricCurves]) -> list[dict[str, Any]]:
    """Return a chart of each reward function's mean, if there are several."""
    lines = [
        _line(one.downsampled_series(f"rewards/{name}/mean"), name, run, index)
        for run, one in enumerate(curves)
        for index, name in enumerate(one.reward_names)
    ]
    if max(len(one.reward_names) for one in curves) < 2:
        return []
    return [{"title": "Rewards by function, before weights", "x": "step", "lines": lines}]


def _profile_panel(stories: Sequence[RunReport]) -> list[dict[str, Any]]:
    lines = [
        _line(_thin_profile(values), label, run, index)
        for run, story in enumerate(stories)
        for index, (label, values) in enumerate(story.kl_by_position.items())
    ]
    if not lines:
        return []
    return [{"title": "KL by position of the token, nats", "x": "token", "lines": lines}]


def _thin_profile(values: list[float]) -> Series:
    chosen = subsample_steps(range(len(values)), MAX_PROFILE_POINTS)
    return chosen, [values[i] if values[i] <= MAX_NATS else math.nan for i in chosen]


def _line(series: Series, label: str, run: int, index: int) -> dict[str, Any]:
    steps, values = series
    return {
        "label": label[:MAX_LABEL],
        "run": run,
        "index": index,
        "x": steps,
        "y": [_round(value) for value in values],
    }


def _round(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _evidence_data(story: RunReport) -> dict[str, Any] | None:
    picture = story.picture
    if picture is None:
        return None
    label = LABELS.get(picture.curve, picture.curve)
    return {
        "firstStep": picture.first_step,
        "lane": gap_lane(picture),
        "title": f"The evidence: {label}"[:MAX_LABEL],
        "unit": "fraction" if picture.curve in FRACTION_CURVES else "",
        "x": "step",
        "lines": [_line(story.curves.downsampled_series(picture.curve), label, 0, 0)],
    }


def _mark_data(mark: TimelineEvent) -> dict[str, Any]:
    kind = KINDS[mark.kind]
    return {
        "step": mark.step,
        "last": mark.last,
        "sign": kind.sign,
        "kind": kind.words,
        "text": mark.description,
    }


def _lane_data(lane: GapLane) -> dict[str, Any]:
    """Return a lane with sizes in hundredths of a decade above the smallest gap."""
    finite = np.isfinite(lane.sizes)
    sizes = np.clip(np.where(finite, lane.sizes, MIN_NATS), MIN_NATS, MAX_NATS)
    levels = np.where(finite, np.rint(LEVELS * np.log10(sizes / MIN_NATS)), -1).astype(int)
    return {
        "title": LANE_TITLES[lane.name],
        "steps": lane.steps,
        "width": lane.width,
        "levels": levels.tolist(),
    }


def _thin_tokens(story: RunReport, steps: list[StepTokens], num: int) -> list[StepTokens]:
    """Return at most `num` steps, always with the one that shows the cause."""
    keep = [] if story.cause_step is None else [story.cause_step]
    chosen = set(subsample_steps([step.step for step in steps], max(num, 1), keep))
    return [step for step in steps if step.step in chosen]


def _token_data(story: RunReport, steps: Sequence[StepTokens]) -> dict[str, Any]:
    """Return the tokens of a run in columns; texts and prompts once each."""
    index = {token_id: i for i, token_id in enumerate(story.texts)}
    prompts: dict[str, int] = {}
    rows = [
        {
            "step": step.step,
            "row": row.row,
            "prompt": prompts.setdefault(row.prompt, len(prompts)),
            "length": row.length,
            "text": [index[int(i)] for i in row.ids],
            "masked": np.flatnonzero(row.trained == 0).tolist(),
            **row.facts,
            **{name: row.columns[name] for name in LOGP_FIELDS},
        }
        for step in steps
        for row in step.rows
    ]
    for row in rows:
        if row["old"] is None:
            row["old"] = row["logp"]
        if row["logp"] == row["old"]:
            row["logp"] = None  # one forward pass served both
    return {
        "texts": list(story.texts.values()) if rows else [],
        "prompts": list(prompts),
        "steps": [[step.step, len(step.rows), step.num_rows] for step in steps],
        "rows": rows,
    }
