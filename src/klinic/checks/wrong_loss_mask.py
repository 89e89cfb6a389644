"""wrong-loss-mask: tokens are trained on that the policy did not emit, or the reverse."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed_finding, passed_finding
from klinic.checks.measures import float64_column, row_numbers, tokens_per_row
from klinic.evidence.record import EmittedBy, StepRecord

MAX_FOREIGN_FRACTION = 0.0  # allowed fraction of trained tokens that the policy did not emit
MAX_LEFT_OUT_FRACTION = (
    0.01  # allowed fraction of emitted tokens, except row ends, that are not trained on
)
MIN_SPAN = 4  # tokens in a row without a sampler log-prob: a lost one stands alone
CERTAIN_LOGP = -0.5  # nats, mean of a span: tokens that are certain have a log-prob of 0 as well
MAX_WITHOUT_FRACTION = 0.01  # of the trained tokens, in such spans
MAX_UNTRAINED_FRACTION = 0.1  # of the tokens with a sampler log-prob, in rows that are trained on


def judge_case(case: Case) -> Finding:
    """Flag a loss mask that differs from the tokens that the policy emitted.

    Looks for
        Trained tokens that a tool or a template inserted; and tokens of the policy that are
        left out, except the last of each row and turn, in rows that are trained on.
    Why it matters
        It is visible on no curve. The policy is trained to write tool output, or part of its
        own output is never trained on.
    Confirmed when
        A single trained token is not the policy's, or more than 1% of its tokens are left out. If
        emitters were not recorded: a hundredth of the trained tokens lie in spans of four or more
        to which the sampler gave no log-prob, or 0, and which are not certain; or a tenth of the
        tokens with one are not trained on.
    Ruled out when
        The trained tokens are those that the policy emitted.
    Confused with
        stop-token-fault (only the last token of rows or turns is left out); misaligned-logp (masks
        are correct, log-probs are shifted).
    """
    record = case.record
    assert record.emitted_by is not None  # noqa: S101 - needed
    own = record.emitted_by == EmittedBy.POLICY
    trained = record.loss_mask
    foreign = float((trained & ~own).sum() / max(int(trained.sum()), 1))
    inner = own & ~_last_tokens(record.row_offsets, own) & _tokens_of_trained_rows(record)
    left_out = float((inner & ~trained).sum() / max(int(inner.sum()), 1))
    wrong = foreign > MAX_FOREIGN_FRACTION or left_out > MAX_LEFT_OUT_FRACTION
    summary = (
        f"{foreign:.2%} of the trained tokens are not the policy's (limit 0%), and {left_out:.2%} "
        f"of its tokens are left out (limit {MAX_LEFT_OUT_FRACTION:.0%})"
    )
    return (failed_finding if wrong else passed_finding)(
        summary, foreign=foreign, left_out=left_out
    )


def _tokens_of_trained_rows(record: StepRecord) -> np.ndarray:
    """Return a mask of tokens in trained rows: excluding a whole row is a choice."""
    is_trained = tokens_per_row(record, record.loss_mask) > 0
    return np.asarray(is_trained[row_numbers(record)])


def _last_tokens(row_offsets: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return a mask of the last token of each row, and of each turn: the next is not the policy's.

    Whether an end is trained on is for stop-token-fault to judge.
    """
    last = np.zeros(len(own), dtype=bool)
    last[:-1] = own[:-1] & ~own[1:]
    ends = row_offsets[1:][np.diff(row_offsets) > 0] - 1
    last[ends] = True
    return last


def confirm_by_sampler(case: Case) -> Finding | None:
    """Confirm the cause by the tokens to which the sampler gave a log-prob: it sampled them."""
    record = case.record
    if record.logp_sampler is None or record.logp_old is None:
        return None
    sampler = float64_column(record, "logp_sampler")
    has_one = np.isfinite(sampler) & (sampler != 0)
    is_sampled_row = tokens_per_row(record, has_one) > 0
    used = is_sampled_row[row_numbers(record)]
    trained = record.loss_mask & used
    if not trained.any():
        return None
    foreign = float(_in_long_spans(record, trained & ~has_one).sum() / trained.sum())
    inner = has_one & ~_last_tokens(record.row_offsets, has_one) & _tokens_of_trained_rows(record)
    left_out = float((inner & ~record.loss_mask).sum() / max(int(inner.sum()), 1))
    if foreign <= MAX_WITHOUT_FRACTION and left_out <= MAX_UNTRAINED_FRACTION:
        return None
    return failed_finding(
        f"{foreign:.2%} of the trained tokens lie in spans without a log-prob of the sampler "
        f"(limit {MAX_WITHOUT_FRACTION:.0%}), and {left_out:.2%} of the tokens with one are left "
        f"out (limit {MAX_UNTRAINED_FRACTION:.0%})",
        foreign=foreign,
        left_out=left_out,
    )


def _in_long_spans(record: StepRecord, without: np.ndarray) -> np.ndarray:
    """Return a mask of the tokens in spans of a row that are long and not certain."""
    kept = np.zeros(len(without), dtype=bool)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], without, [False]]).astype(int)))
    rows, old = row_numbers(record), float64_column(record, "logp_old")
    for start, end in edges.reshape(-1, 2).tolist():
        is_certain = not np.nanmean(old[start:end]) < CERTAIN_LOGP
        if end - start >= MIN_SPAN and rows[start] == rows[end - 1] and not is_certain:
            kept[start:end] = True
    return kept


CHECK = Check(
    name="wrong-loss-mask",
    description="tokens are trained on that the policy did not emit, or the reverse",
    stage=Stage.ALIGNMENT,
    needs=("record.emitted_by",),
    fix="Build the mask from the emitter of each token, and use the same mask for the policy term, "
    "the KL, metrics and denominators.",
    judge=judge_case,
    confirm=confirm_by_sampler,
    explains=(
        *("stop-token-fault", "nan-outside-mask", "step-too-big", "unexplained-gap"),
        *("misaligned-logp", "broken-sampler", "stale-sampler", "hidden-sampling-transform"),
        *("corrupted-sync", "gap-grows-with-position"),
    ),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.logp_sampler",
        "record.logp_old",
        "record.logp_ref",
        "facts.loss_mask_from",
    ),
)
