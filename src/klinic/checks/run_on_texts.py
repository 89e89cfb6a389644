"""Texts that run on after their answer into turns of the user that the policy invents.

An environment with turns writes the user's turns too. Its rows end as its first turns end; a
completion that no end token stops is cut anywhere.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from klinic.checks.base import Case
from klinic.checks.row_texts import completion_texts, has_texts, prompt_texts
from klinic.evidence.record import StepRecord

MIN_ROWS = 16
MIN_RUN_ON_FRACTION = 0.5  # of the completions have a turn of the user
MIN_COMMON_END = 0.7  # of their first turns end with the same character
MAX_ENDED_FRACTION = 0.5  # of them end with it as a whole
MIN_OPENING = 2  # characters of what all prompts begin with
USER = "user|human|question|q|instruction"
TURN = re.compile(
    r"<\|(?:im_start|start_header_id|start_of_role)\|>|<start_of_turn>|"
    rf"(?:^|[\n.>}}\])!?])[ \t]*(?:### ?)?(?:{USER})[ \t]*(?::|\n)",
    re.IGNORECASE,
)
TOOL = re.compile(
    r"<tool_call>|<tool_response>|<information>|<search>|<\|python_tag\|>|\bObservation:|"
    r"<function_results>|<interpreter>|```output"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOnTexts:
    """Completions with a turn of the user, and where they end."""

    rows: int
    with_turn: int
    ended: int
    """Those of them whose last character ends most first turns."""

    @property
    def fraction(self) -> float:
        """Fraction of the completions with a turn of the user."""
        return self.with_turn / self.rows


def find_run_on_texts(case: Case) -> RunOnTexts | None:
    """Return the completions that run on in the recent steps; None if few do or they end."""
    if not has_texts(case):
        return None
    steps = [case.measure_once(_split_rows, record) for record in case.recent_records]
    rows = sum(step.rows for step in steps)
    first_ends = [end for step in steps for end in step.first_ends]
    last_ends = [end for step in steps for end in step.last_ends]
    if rows < MIN_ROWS or len(first_ends) < MIN_RUN_ON_FRACTION * rows:
        return None
    end, count = Counter(first_ends).most_common(1)[0]
    ended = last_ends.count(end)
    if count < MIN_COMMON_END * len(first_ends) or ended > MAX_ENDED_FRACTION * len(last_ends):
        return None
    return RunOnTexts(rows=rows, with_turn=len(first_ends), ended=ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepEnds:
    rows: int
    first_ends: list[str]
    """Last character of the first turn of each completion with a turn of the user."""
    last_ends: list[str]
    """Last character of each such completion."""


def _split_rows(record: StepRecord) -> _StepEnds:
    texts = [text.strip() for text in completion_texts(record)]
    opening = _common_opening(prompt_texts(record))
    first_ends, last_ends = [], []
    for text in texts:
        start = None if TOOL.search(text) else _turn_start(text, opening)
        if start is not None:
            first_ends.append(text[:start].rstrip()[-1])
            last_ends.append(text[-1])
    return _StepEnds(rows=len(texts), first_ends=first_ends, last_ends=last_ends)


def _turn_start(text: str, opening: str) -> int | None:
    """Return where the first turn of the user begins, after some text of the policy."""
    match = next((m for m in TURN.finditer(text) if text[: m.start() + 1].strip()), None)
    starts = [] if match is None else [match.start() + (match[0][0] in ".>}])!?")]
    if opening and (place := text.find(f"\n{opening}")) > 0:
        starts.append(place)
    starts = [start for start in starts if text[:start].strip()]
    return min(starts, default=None)


def _common_opening(prompts: Sequence[str]) -> str:
    """Return the first line of all prompts, up to a colon, if different prompts share it."""
    openings = {re.split(r"[:\n]", prompt.lstrip(), maxsplit=1)[0] for prompt in set(prompts)}
    is_shared = len(set(prompts)) > 1 and len(openings) == 1
    opening = openings.pop() if is_shared else ""
    return opening if len(opening) >= MIN_OPENING else ""
