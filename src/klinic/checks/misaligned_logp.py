"""misaligned-logp: log-probs belong to other tokens than those they stand beside."""

from dataclasses import dataclass

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import (
    column,
    difference,
    finite_tokens,
    fraction,
    known_tokens,
    mean,
    median,
    row_gaps,
    row_numbers,
)
from klinic.evidence.record import EmittedBy, StepRecord

SHIFTS = (-2, -1, 1, 2)
LARGE = 0.3  # nats, mean of a row: ten times that of bf16 against fp32
REMOVED = 0.5  # of the gap, by a shift; unrelated tokens lose nothing by one
FITS = 0.1  # nats, of the token in the middle once it is shifted: half of a gap goes by chance
SOME = 0.1  # of the rows that must be hit
CERTAIN = -1.0  # nats: a token below it was not certain, so a log-prob of exactly 0 is a filler
FILLED = 0.001  # of the tokens
ENOUGH = 20  # tokens
UNSURE = -0.3  # nats: what is certain on both sides fits by any shift
SEVERAL = 5  # unsure tokens that must fit


def judge(case: Case) -> Finding:
    """Flag log-probs that fit the token beside theirs, or that were never computed.

    Looks for
        Rows with a large gap to the learner's log-probs, and a shift along the row that removes
        it, for the sampler's log-probs and, before the first update, the reference's; and
        log-probs of exactly 0 at tokens that were not certain.
    Why it matters
        KLs of tens and ratios of thousands on single tokens, with completions that look fine. It
        is often taken for an estimator that is unstable.
    Confirmed when
        A tenth of the rows have a mean gap above 0.3 nats, and one shift takes away half of it
        and leaves half of the tokens that are not certain within 0.1 nats; or more than one token
        in a thousand was filled with 0.
    Ruled out when
        The gap is small as it stands, or no shift removes it.
    Confused with
        temperature-on-one-side (the gap is a line over logp + entropy); retokenised (only rows
        that do not survive decoding and encoding); kl-tail-dominates (single tokens, k1 small).
    """
    record = case.record
    columns = [] if record.logp_sampler is None else ["logp_sampler"]
    if record.logp_ref is not None and case.version in (0, None):  # a policy that left it differs
        columns.append("logp_ref")
    if not columns or record.loss_mask.sum() < ENOUGH:
        return no_data(f"fewer than {ENOUGH} trained tokens have a log-prob of both sides")
    found = {column: scan(record, column) for column in columns}
    column = max(found, key=lambda c: found[c].gap - found[c].shifted)
    scanned = found[column]
    filled = max(share_filled(record, column) for column in columns)
    removed = scanned.shifted < REMOVED * scanned.gap and scanned.middle < FITS
    shifted = scanned.rows > SOME and removed
    summary = (
        f"{scanned.rows:.0%} of the rows have `{column}` {scanned.gap:.3g} nats from the "
        f"learner's, {scanned.shifted:.3g} when shifted by {scanned.shift:+d} (limits {SOME:.0%}, "
        f"and {REMOVED:.0%} of it), half of the unsure {scanned.middle:.2g} or less (limit "
        f"{FITS:g}); {filled:.2%} filled with 0"
    )
    figures = {"gap": scanned.gap, "shifted_gap": scanned.shifted, "filled": filled}
    return (failed if shifted or filled > FILLED else passed)(summary, **figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a shift does to the rows whose gap is large."""

    rows: float
    """Share of such rows."""
    gap: float
    shifted: float
    middle: float
    """The median of the shifted gap at tokens that are not certain, where `shifted` is the mean at
    all of them."""
    shift: int


def scan(record: StepRecord, name: str) -> Scan:
    """Return the mean gap of the rows that have one, and the least under a shift within rows."""
    means = row_gaps(record, "logp_old", name)
    hit = np.nan_to_num(means) > LARGE
    share = fraction(hit) if hit.size else 0.0
    nothing = Scan(rows=share, gap=0.0, shifted=0.0, middle=0.0, shift=0)
    if not share:  # as in most steps: there is nothing to remove
        return nothing
    tokens = known_tokens(record, "logp_old", name) & hit[row_numbers(record)]
    if np.count_nonzero(tokens) < ENOUGH:
        return nothing
    pairs = {shift: _gaps(record, name, tokens, shift) for shift in SHIFTS}
    usable = {shift: pair for shift, pair in pairs.items() if pair is not None}
    if not usable:
        return nothing
    best = min(usable, key=lambda shift: usable[shift][1] - REMOVED * usable[shift][0])
    gap, shifted, middle = usable[best]
    return Scan(rows=share, gap=gap, shifted=shifted, middle=middle, shift=best)


def _gaps(
    record: StepRecord, name: str, tokens: np.ndarray, shift: int
) -> tuple[float, float, float] | None:
    """Return the mean of |old[t] - other[t]|, and mean and median of |old[t + shift] - other[t]|.

    All over the tokens whose other is in the same row: in a short row, a shift that merely leaves
    the worst token out would seem to remove the gap.
    """
    here, there = (
        (slice(-shift), slice(shift, None)) if shift > 0 else (slice(-shift, None), slice(shift))
    )
    row, finite = row_numbers(record), finite_tokens(record, "logp_old")
    known = np.flatnonzero(tokens[here] & (row[here] == row[there]) & finite[there])
    if known.size < ENOUGH:
        return None
    old, other = column(record, "logp_old")[there][known], column(record, name)[here][known]
    stay = np.abs(difference(record, "logp_old", name)[here][known])
    shifted = np.abs(old - other)
    unsure = shifted[np.minimum(old, other) < UNSURE]
    middle = median(unsure) if len(unsure) >= SEVERAL else np.inf
    return mean(stay), mean(shifted), middle


def share_filled(record: StepRecord, name: str) -> float:
    """Return the share of trained tokens with a log-prob of exactly 0 that were not certain.

    Only of the policy's own: what somebody else said has no log-prob, and is the mask's affair.
    """
    trained = known_tokens(record, name)
    if record.emitted_by is not None:
        trained = trained & (record.emitted_by == EmittedBy.POLICY)
    num = np.count_nonzero(trained)
    if not num:
        return 0.0
    filled = (column(record, name) == 0) & (column(record, "logp_old") < CERTAIN) & trained
    return float(np.count_nonzero(filled) / num)


CHECK = Check(
    name="misaligned-logp",
    stage=Stage.ALIGNMENT,
    needs=("record.logp_old",),
    fix="Let position t hold the log-prob of token t on every side; assert equal lengths, and use "
    "NaN with a mask where there is none, never 0.",
    judge=judge,
    also=("record.logp_sampler",),
    explains=(
        *("temperature-on-one-side", "wrong-reference", "stale-sampler", "imprecise-logp"),
        *("hidden-sampling-transform", "kl-tail-dominates", "stale-prefix-cache", "step-too-big"),
    ),
)
