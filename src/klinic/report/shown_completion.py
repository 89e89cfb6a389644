"""The text of a completion that shows the evidence of a cause, readable without scripts."""

from collections.abc import Mapping
from dataclasses import dataclass

from klinic.evidence.record import StepRecord
from klinic.report.evidence_row import EvidenceRow
from klinic.report.short_number import short_number
from klinic.report.token_heatmap import token_text
from klinic.report.token_table import finish_reason, prompt_text

NUM_BEFORE = 80  # tokens shown before the first marked one
NUM_SHOWN = 240  # tokens shown of a completion


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """Tokens of a completion that are all marked, or all not."""

    text: str
    is_marked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCompletion:
    """A completion with its text and facts."""

    step: int
    row: int
    token: int | None
    """The token to look at first."""
    reason: str
    prompt: str
    facts: tuple[str, ...]
    num_before: int
    """Tokens before the first one shown."""
    parts: tuple[TextPart, ...]
    num_after: int
    twin: "ShownCompletion | None" = None
    """A second completion to compare it with."""

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of this completion and of its twin."""
        return (self.row,) if self.twin is None else (self.row, self.twin.row)

    @property
    def place(self) -> str:
        """The step, completion and token as the end of an address."""
        token = "" if self.token is None else f"-token-{self.token}"
        return f"step-{self.step}-completion-{self.row}{token}"


def show_completion(
    record: StepRecord, texts: Mapping[int, str], evidence: EvidenceRow
) -> ShownCompletion:
    """Return the text of the completion that was selected, around its marked tokens."""
    twin = None
    if evidence.twin is not None:
        twin = show_completion(record, texts, EvidenceRow(row=evidence.twin, reason=""))
    row = evidence.row
    start, end = int(record.row_offsets[row]), int(record.row_offsets[row + 1])
    first = max(0, min(evidence.tokens, default=0) - NUM_BEFORE)
    last = min(end - start, first + NUM_SHOWN)
    return ShownCompletion(
        step=record.step,
        row=row,
        token=evidence.tokens[0] if evidence.tokens else None,
        reason=evidence.reason,
        prompt=prompt_text(record, row, texts),
        facts=_row_facts(record, row),
        num_before=first,
        parts=_text_parts(record, texts, range(start + first, start + last), evidence, start),
        num_after=end - start - last,
        twin=twin,
    )


def _row_facts(record: StepRecord, row: int) -> tuple[str, ...]:
    facts = []
    if record.reward is not None:
        facts.append(f"reward {short_number(record.reward[row])}")
    if record.advantage is not None:
        facts.append(f"advantage {short_number(record.advantage[row])}")
    facts.append(f"{record.row_offsets[row + 1] - record.row_offsets[row]} tokens")
    if finish := finish_reason(record, row):
        facts.append(f"finish {finish}")
    return tuple(facts)


def _text_parts(
    record: StepRecord,
    texts: Mapping[int, str],
    indices: range,
    evidence: EvidenceRow,
    start: int,
) -> tuple[TextPart, ...]:
    """Return the tokens at some indices, joined where both or neither are marked."""
    marked = {start + token for token in evidence.tokens}
    parts: list[tuple[bool, list[str]]] = []
    for i in indices:
        if not parts or parts[-1][0] != (i in marked):
            parts.append((i in marked, []))
        parts[-1][1].append(token_text(int(record.token_ids[i]), texts))
    return tuple(TextPart(text="".join(pieces), is_marked=flag) for flag, pieces in parts)
