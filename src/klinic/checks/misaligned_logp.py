"""misaligned-logp: log-probs belong to other tokens than those they stand beside."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed

SHIFTS = (-2, -1, 1, 2)
LARGE = 0.3  # nats: a gap ten times that of bf16 against fp32
REMOVED = 0.5  # of the gap, by a shift; unrelated tokens lose nothing by one
CERTAIN = -1.0  # nats: a token below it was not certain, so a log-prob of exactly 0 is a filler
FILLED = 0.001  # of the tokens
ENOUGH = 50  # tokens


def judge(case: Case) -> Finding:
    """Flag log-probs that fit the token beside theirs, or that were never computed.

    Looks for
        A shift along the row that removes the gap to the learner's log-probs, for the sampler's
        and, before the first update, the reference's; and log-probs of exactly 0 at tokens that
        were not certain.
    Why it matters
        KLs of tens and ratios of thousands on single tokens, with completions that look fine. It
        is often taken for an estimator that is unstable.
    Confirmed when
        The mean gap is above 0.3 nats, and a shift by one or two takes away half of it; or more
        than one token in a thousand was filled with 0.
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
    found = {column: scan(case, column) for column in columns}
    known = {column: result for column, result in found.items() if result is not None}
    if not known:
        return no_data(f"fewer than {ENOUGH} trained tokens have a log-prob of both sides")
    column = max(known, key=lambda c: known[c][0])
    gap, best, shift = known[column]
    filled = max(share_filled(case, column) for column in known)
    wrong = (gap > LARGE and best < REMOVED * gap) or filled > FILLED
    summary = (
        f"`{column}` is {gap:.3g} nats from the learner's, {best:.3g} when shifted by {shift:+d} "
        f"(limits {LARGE:g}, and {REMOVED:.0%} of it); {filled:.2%} filled with 0"
    )
    return (failed if wrong else passed)(summary, gap=gap, shifted_gap=best, filled=filled)


def scan(case: Case, column: str) -> tuple[float, float, int] | None:
    """Return the mean gap, the least one under a shift within rows, and that shift."""
    record = case.record
    old = np.asarray(record.logp_old, dtype=np.float64)
    other = np.asarray(getattr(record, column), dtype=np.float64)
    gap = _gap(old, other, record.row_offsets, record.loss_mask, 0)
    if gap is None:
        return None
    shifted = {s: _gap(old, other, record.row_offsets, record.loss_mask, s) for s in SHIFTS}
    known = {s: value for s, value in shifted.items() if value is not None}
    if not known:
        return gap, gap, 0
    best = min(known, key=lambda s: known[s])
    return gap, known[best], best


def _gap(
    old: np.ndarray, other: np.ndarray, row_offsets: np.ndarray, mask: np.ndarray, shift: int
) -> float | None:
    """Return the mean of |old[t + shift] - other[t]| over trained tokens of the same row."""
    tokens = np.arange(len(old))
    row = np.searchsorted(row_offsets, tokens, side="right")
    moved = tokens + shift
    inside = (moved >= 0) & (moved < len(old))
    moved = np.clip(moved, 0, max(len(old) - 1, 0))
    known = mask & inside & (row[moved] == row) & np.isfinite(other) & np.isfinite(old[moved])
    if known.sum() < ENOUGH:
        return None
    return float(np.abs(old[moved] - other)[known].mean())


def share_filled(case: Case, column: str) -> float:
    """Return the share of trained tokens with a log-prob of exactly 0 that were not certain."""
    record = case.record
    other = np.asarray(getattr(record, column), dtype=np.float64)
    old = np.asarray(record.logp_old, dtype=np.float64)
    trained = record.loss_mask & np.isfinite(other)
    if not trained.any():
        return 0.0
    return float(((other == 0) & (old < CERTAIN))[trained].mean())


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
