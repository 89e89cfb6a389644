"""misaligned-logp: log-probs are stored at other tokens than their own."""

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
REMOVED = 0.5  # max fraction of the gap left by a shift; unrelated tokens keep all of it
FITS = 0.1  # nats, median after the shift: half of a gap can vanish by chance
SOME = 0.1  # min fraction of affected rows
CERTAIN = -1.0  # nats: for a token below it, a log-prob of exactly 0 is a filler
FILLED = 0.001  # fraction of tokens
ENOUGH = 20  # tokens
UNSURE = -0.3  # nats: tokens certain on both sides fit any shift
SEVERAL = 5  # min number of uncertain tokens


def judge(case: Case) -> Finding:
    """Flag log-probs that fit the neighbouring token, or that were never computed.

    Looks for
        Rows with a large gap to the learner's log-probs, and a shift along the row that removes
        it, for the sampler's log-probs and, before the first update, the reference's; and
        log-probs of exactly 0 at tokens that were not certain.
    Why it matters
        KLs of tens and ratios of thousands on single tokens, with completions that look fine.
        It is often mistaken for an unstable estimator.
    Confirmed when
        A tenth of the rows have a mean gap above 0.3 nats, and one shift removes half of it and
        leaves half of the uncertain tokens within 0.1 nats; or more than one token in a
        thousand was filled with 0.
    Ruled out when
        The gap is small without a shift, or no shift removes it.
    Confused with
        temperature-on-one-side (the gap is a line over logp + entropy); retokenised (only rows
        that do not survive decoding and encoding); kl-tail-dominates (single tokens, k1 small).
    """
    record = case.record
    columns = [] if record.logp_sampler is None else ["logp_sampler"]
    if record.logp_ref is not None and case.version in (0, None):  # equal before any update
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
        f"and {REMOVED:.0%} of it), median of uncertain tokens {scanned.middle:.2g} (limit "
        f"{FITS:g}); {filled:.2%} filled with 0"
    )
    figures = {"gap": scanned.gap, "shifted_gap": scanned.shifted, "filled": filled}
    return (failed if shifted or filled > FILLED else passed)(summary, **figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Effect of the best shift on the rows with a large gap."""

    rows: float
    """Fraction of such rows."""
    gap: float
    shifted: float
    middle: float
    """Median of the shifted gap at uncertain tokens; `shifted_gap` is the mean at all tokens."""
    shift: int


def scan(record: StepRecord, name: str) -> Scan:
    """Return the mean gap of rows with a large gap, and the smallest one under a shift."""
    means = row_gaps(record, "logp_old", name)
    hit = np.nan_to_num(means) > LARGE
    share = fraction(hit) if hit.size else 0.0
    nothing = Scan(rows=share, gap=0.0, shifted=0.0, middle=0.0, shift=0)
    if not share:  # the usual case
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

    All over the tokens whose shifted position is in the same row: in a short row, a shift that
    merely drops the worst token would seem to remove the gap.
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
    """Return the fraction of trained tokens with a log-prob of exactly 0 that were not certain.

    Counts the policy's tokens only: inserted tokens have no log-prob; wrong-loss-mask covers them.
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
    fix="Store the log-prob of token t at position t on every side; assert equal lengths, and use "
    "NaN with a mask for missing values, never 0.",
    judge=judge,
    also=("record.logp_sampler",),
    explains=(
        *("temperature-on-one-side", "wrong-reference", "stale-sampler", "imprecise-logp"),
        *("hidden-sampling-transform", "kl-tail-dominates", "stale-prefix-cache", "step-too-big"),
    ),
)
