"""stop-token-fault: the end of a completion is masked, missed or trained past."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import row_numbers
from klinic.evidence.record import EmittedBy, StepRecord

ENOUGH = 8  # rows that ended on their own
MASKED = 0.5  # max fraction of their last tokens that are not trained on
MISSED = 0.0  # fraction of rows that continue after an end token, or are truncated at one
IGNORED = 0.1  # fraction of rows that continue after an end token of the model's files only


def judge(case: Case) -> Finding:
    """Flag ends of completions that the policy cannot learn from.

    Looks for
        Rows that ended on their own and whose end token is not trained on; rows that continue
        after an end token; rows that end with one and are marked as truncated; and rows that
        continue after a token that is an end token in the model's generation config and not in
        the trainer, as with models that have a separate end-of-turn token.
    Why it matters
        A policy that gets no signal for ending learns to ramble into the length limit, and its
        rewards then measure that limit.
    Confirmed when
        Half of the end tokens are not trained on, or a single row continues after one or is
        marked as truncated at one, or one in ten continues after one that the trainer does not
        use.
    Ruled out when
        End tokens are trained on, and end their rows.
    Confused with
        wrong-loss-mask (tokens inside rows are left out); context-truncated (rows are truncated
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
            f"{ignored:.0%} of the rows continue after an end token of the model's generation "
            f"config that the trainer does not use (limit {IGNORED:.0%})",
            ignored=ignored,
        )
    if stopped.sum() < ENOUGH and not missed:
        return no_data(f"{stopped.sum()} rows ended on their own, {ENOUGH} needed")
    masked = float((~record.loss_mask[last[stopped]]).mean()) if stopped.any() else 0.0
    share = missed / max(len(last), 1)
    summary = (
        f"{masked:.0%} of the end tokens are not trained on (limit {MASKED:.0%}), and {missed} of "
        f"{len(last)} rows continue after one or are truncated at one (limit 0)"
    )
    wrong = masked > MASKED or share > MISSED
    return (failed if wrong else passed)(summary, masked=masked, missed=share)


def _ignored(record: StepRecord, run: Mapping[str, Any]) -> float:
    """Return the fraction of rows in which the policy continues after an unused end token."""
    unknown = set(run.get("declared_eos_ids") or ()) - set(run["eos_ids"])
    if not unknown:
        return 0.0
    row = row_numbers(record)
    goes_on = np.isin(record.token_ids[:-1], list(unknown)) & (row[1:] == row[:-1])
    if record.emitted_by is not None:  # a tool may reply after a turn ended
        goes_on &= record.emitted_by[1:] == EmittedBy.POLICY
    return len(set(row[:-1][goes_on].tolist())) / record.num_rows


CHECK = Check(
    name="stop-token-fault",
    stage=Stage.ALIGNMENT,
    needs=("record.finish_reason", "run.eos_ids"),
    fix="Derive masks and ends from lengths and finish reasons, not from token values, and use "
    "every end token of the model.",
    judge=judge,
    explains=("context-truncated",),
)
