"""wrong-loss-mask: tokens are trained on that the policy did not emit, or the reverse."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, passed
from klinic.checks.measures import row_numbers
from klinic.evidence.record import EmittedBy, StepRecord
from klinic.maths.arrays import segment_sum

FOREIGN = 0.0  # share of trained tokens that somebody else emitted: none is right
LEFT_OUT = 0.01  # share of emitted tokens, ends of rows apart, that are not trained on


def judge(case: Case) -> Finding:
    """Flag a loss mask that is not the tokens which the policy emitted.

    Looks for
        Trained tokens that a tool or a template put there; and tokens of the policy that are left
        out, the last of each row apart, in rows that are trained on.
    Why it matters
        It looks wrong on no curve. The policy is taught to write what tools say, or part of what
        it says is never judged.
    Confirmed when
        A single trained token is not the policy's, or more than 1% of its tokens are left out.
    Ruled out when
        Trained tokens are those that the policy emitted.
    Confused with
        stop-token-fault (only the last token of rows is left out); misaligned-logp (masks are
        right, log-probs stand elsewhere).
    """
    record = case.record
    assert record.emitted_by is not None  # noqa: S101 - needed
    own = record.emitted_by == EmittedBy.POLICY
    trained = record.loss_mask
    foreign = float((trained & ~own).sum() / max(int(trained.sum()), 1))
    inner = own & ~_last_of_rows(record.row_offsets, len(own)) & _rows_in_use(record)
    left_out = float((inner & ~trained).sum() / max(int(inner.sum()), 1))
    wrong = foreign > FOREIGN or left_out > LEFT_OUT
    summary = (
        f"{foreign:.2%} of the trained tokens are not the policy's (limit 0%), and {left_out:.2%} "
        f"of its tokens are left out (limit {LEFT_OUT:.0%})"
    )
    return (failed if wrong else passed)(summary, foreign=foreign, left_out=left_out)


def _rows_in_use(record: StepRecord) -> np.ndarray:
    """Return the tokens of rows that are trained on at all: to leave out a row is a choice."""
    rows = row_numbers(record)
    used = segment_sum(record.loss_mask.astype(np.float64), rows, record.num_rows) > 0
    return np.asarray(used[rows])


def _last_of_rows(row_offsets: np.ndarray, num_tokens: int) -> np.ndarray:
    last = np.zeros(num_tokens, dtype=bool)
    ends = row_offsets[1:][np.diff(row_offsets) > 0] - 1
    last[ends] = True
    return last


CHECK = Check(
    name="wrong-loss-mask",
    stage=Stage.ALIGNMENT,
    needs=("record.emitted_by",),
    fix="Build the mask from who emitted a token, and use the same one for the policy term, the "
    "KL, metrics and denominators.",
    judge=judge,
    explains=("stop-token-fault", "nan-outside-mask", "step-too-big"),
)
