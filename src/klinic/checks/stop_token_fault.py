"""stop-token-fault: the end of a completion is masked, missed or trained past."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import row_numbers
from klinic.evidence.record import EmittedBy, StepRecord

ENOUGH = 8  # rows that ended by themselves
MASKED = 0.5  # share of their last tokens that are not trained on
MISSED = 0.0  # share of rows that go on behind an end token, or end with one and count as cut off
IGNORED = 0.1  # share of rows that go on behind an end which nobody but the model's files knows


def judge(case: Case) -> Finding:
    """Flag ends of completions that the policy cannot learn from.

    Looks for
        Rows that ended by themselves and whose end token is not trained on; rows that go on
        behind an end token; rows that end with one and yet are said to be cut off; and rows that
        go on behind a token which the model's generation config names as an end and the trainer
        does not, as with models that end a turn by a token of its own.
    Why it matters
        A policy that is never told that it ended well learns to ramble into the length limit, and
        its rewards then measure that limit.
    Confirmed when
        Half of the end tokens are not trained on, or a single row goes on behind one or is said to
        be cut off at one, or one in ten goes on behind one that the trainer does not know.
    Ruled out when
        End tokens are trained on, and are ends.
    Confused with
        wrong-loss-mask (tokens inside rows are left out); context-truncated (rows are cut off
        before any end).
    """
    record = case.record
    assert record.finish_reason is not None  # noqa: S101 - needed
    has_tokens = np.diff(record.row_offsets) > 0
    last = (record.row_offsets[1:] - 1)[has_tokens]
    reason = record.finish_reason[has_tokens]
    is_end = np.isin(record.token_ids, np.asarray(case.run["eos_ids"]))
    stopped = reason == "stop"
    inner = is_end.copy()
    inner[last] = False
    missed = int(inner.sum()) + int((is_end[last] & (reason == "length")).sum())
    ignored = _ignored(record, case.run)
    if ignored > IGNORED:
        return failed(
            f"{ignored:.0%} of the rows go on behind an end that the model's files name and the "
            f"trainer does not know (limit {IGNORED:.0%})",
            ignored=ignored,
        )
    if stopped.sum() < ENOUGH and not missed:
        return no_data(f"{stopped.sum()} rows ended by themselves, and {ENOUGH} are needed")
    masked = float((~record.loss_mask[last[stopped]]).mean()) if stopped.any() else 0.0
    share = missed / max(len(last), 1)
    summary = (
        f"{masked:.0%} of the end tokens are not trained on (limit {MASKED:.0%}), and {missed} of "
        f"{len(last)} rows go on behind one or count as cut off (limit 0)"
    )
    wrong = masked > MASKED or share > MISSED
    return (failed if wrong else passed)(summary, masked=masked, missed=share)


def _ignored(record: StepRecord, run: Mapping[str, Any]) -> float:
    """Return the share of rows in which the policy itself goes on behind an unknown end."""
    unknown = set(run.get("declared_eos_ids") or ()) - set(run["eos_ids"])
    if not unknown:
        return 0.0
    row = row_numbers(record)
    goes_on = np.isin(record.token_ids[:-1], list(unknown)) & (row[1:] == row[:-1])
    if record.emitted_by is not None:  # a tool may answer to a turn that ended
        goes_on &= record.emitted_by[1:] == EmittedBy.POLICY
    return len(set(row[:-1][goes_on].tolist())) / record.num_rows


CHECK = Check(
    name="stop-token-fault",
    stage=Stage.ALIGNMENT,
    needs=("record.finish_reason", "run.eos_ids"),
    fix="Take masks and ends from lengths and finish reasons, not from token values, and honour "
    "every end token of the model.",
    judge=judge,
    explains=("context-truncated",),
)
