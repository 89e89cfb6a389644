"""misaligned-logp: log-probs are stored at other tokens than their own."""

from dataclasses import dataclass

import numpy as np

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.gap_models import GapModel, compete_on_sampler_gap
from klinic.checks.measures import (
    column_difference,
    finite_tokens,
    finite_trained_tokens,
    float64_column,
    fraction_true,
    mean,
    median,
    rms_logp_gap,
    row_logp_gaps,
    row_numbers,
)
from klinic.checks.other_rows import MIN_MATCHED, match_other_rows
from klinic.evidence.record import EmittedBy, StepRecord

SHIFTS = (-2, -1, 1, 2)
LARGE_ROW_GAP = 0.3  # nats, mean of a row: ten times that of bf16 against fp32
MAX_REMAINING_FRACTION = (
    0.5  # max fraction of the gap left by a shift; unrelated tokens keep all of it
)
MAX_SHIFTED_MEDIAN = 0.1  # nats, median after the shift: half of a gap can vanish by chance
MIN_ROW_FRACTION = 0.1  # min fraction of affected rows
CERTAIN_LOGP = -1.0  # nats: for a token below it, a log-prob of exactly 0 is a filler
MAX_FILLED_FRACTION = 0.001  # fraction of tokens
MIN_GAP_GROWTH = 5.0  # times the gap of the first step: a position is wrong from the start
MIN_TOKENS = 20  # tokens
UNCERTAIN_LOGP = -0.3  # nats: tokens certain on both sides fit any shift
MIN_UNCERTAIN_TOKENS = 5  # min number of uncertain tokens


def judge_case(case: Case) -> Finding:
    """Flag log-probs that fit the neighbouring token, or that were never computed.

    Looks for
        Rows with a large gap to the learner's log-probs, and a shift along the row that removes
        it, for the sampler's log-probs and, before the first update, the reference's; logits or
        ids that are off by one position, which no shift of log-probs undoes; log-probs of
        exactly 0 at tokens that were not certain; and rows with the log-probs of another row.
    Why it matters
        KLs of tens and ratios of thousands on single tokens, with completions that look fine.
        It is often mistaken for an unstable estimator.
    Confirmed when
        A tenth of the rows have a mean gap above 0.3 nats, and one shift removes half of it and
        leaves half of the uncertain tokens within 0.1 nats; or tokens surprise one side by a
        nat above the entropy, and the gap vanishes where a token equals its neighbour or the
        learner's entropies fit the sampler's neighbouring tokens; or more than one token in a
        thousand was filled with 0; or four of five rows with such a gap have the log-probs of
        another row of the step.
    Ruled out when
        The gap is small without a shift, or no shift removes it.
    Confused with
        temperature-on-one-side (the gap is a line over logp + entropy); retokenised (only rows
        that do not survive decoding and encoding); kl-tail-dominates (single tokens, k1 small).
    """
    record = case.record
    columns = [] if record.logp_sampler is None else ["logp_sampler"]
    if record.logp_ref is not None and case.learner_version in (0, None):  # equal before any update
        columns.append("logp_ref")
    if not columns or record.loss_mask.sum() < MIN_TOKENS:
        return no_data_finding(
            f"fewer than {MIN_TOKENS} trained tokens have a log-prob of both sides"
        )
    if (finding := _judge_neighbours(case) or _judge_other_rows(record, columns)) is not None:
        return finding
    scans = {column: scan_shifts(record, column) for column in columns}
    column = max(scans, key=lambda c: scans[c].gap - scans[c].shifted_gap)
    best_scan = scans[column]
    filled_fraction = max(filled_fraction_of(record, column) for column in columns)
    is_removed = (
        best_scan.shifted_gap < MAX_REMAINING_FRACTION * best_scan.gap
        and best_scan.shifted_median < MAX_SHIFTED_MEDIAN
    )
    is_shifted = best_scan.row_fraction > MIN_ROW_FRACTION and is_removed
    summary = (
        f"{best_scan.row_fraction:.0%} of the rows have "
        f"`{column}` {best_scan.gap:.3g} nats from the "
        f"learner's, {best_scan.shifted_gap:.3g} when shifted by "
        f"{best_scan.shift:+d} (limits {MIN_ROW_FRACTION:.0%}, "
        f"and {MAX_REMAINING_FRACTION:.0%} of it), median of uncertain "
        f"tokens {best_scan.shifted_median:.2g} (limit "
        f"{MAX_SHIFTED_MEDIAN:g}); {filled_fraction:.2%} filled with 0"
    )
    figures = {
        "gap": best_scan.gap,
        "shifted_gap": best_scan.shifted_gap,
        "filled": filled_fraction,
    }
    return (
        failed_finding if is_shifted or filled_fraction > MAX_FILLED_FRACTION else passed_finding
    )(summary, **figures)


def _judge_neighbours(case: Case) -> Finding | None:
    """Return a finding if logits or ids are off by one position."""
    if case.record.logp_sampler is None:
        return None
    competition = case.measure_once(compete_on_sampler_gap, case.record)
    winner = competition.winner
    if winner is None or not competition.is_won_by(GapModel.SHIFTED_IDS, GapModel.SHIFTED_LOGITS):
        return None
    if _appeared_with_updates(case, competition.size):
        return None
    return failed_finding(
        f"sampler and learner are {competition.size:.3g} nats apart, and one of them scores "
        f"{winner.model} (offset {winner.value:+.0f}), which explains {winner.explained:.0%} of it",
        gap=competition.size,
        covered=winner.explained,  # by its form, which other causes may have: it predicts no token
    )


def _judge_other_rows(record: StepRecord, columns: list[str]) -> Finding | None:
    """Return a finding if one side's rows are in another order."""
    for column in columns:
        if (found := match_other_rows(record, column)) is not None:
            return failed_finding(
                f"{found.matched} of {found.with_gap} rows with a gap have in `{column}` the "
                f"log-probs of another row (limit {MIN_MATCHED:.0%}): its rows are in another "
                "order",
                rows=float(found.matched),
            )
    return None


def _appeared_with_updates(case: Case, size: float) -> bool:
    """Return whether the gap was absent in the first step: old weights, not another position."""
    start = case.start
    if start is None or start is case.record or start.logp_sampler is None:
        return False
    return MIN_GAP_GROWTH * rms_logp_gap(start, "logp_sampler", "logp_old") < size


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftScan:
    """Effect of the best shift on the rows with a large gap."""

    row_fraction: float
    """Fraction of such rows."""
    gap: float
    shifted_gap: float
    shifted_median: float
    """Median of the shifted gap at uncertain tokens; `shifted_gap` is the mean at all tokens."""
    shift: int


def scan_shifts(record: StepRecord, name: str) -> ShiftScan:
    """Return the mean gap of rows with a large gap, and the smallest one under a shift."""
    means = row_logp_gaps(record, "logp_old", name)
    has_gap = np.nan_to_num(means) > LARGE_ROW_GAP
    row_fraction = fraction_true(has_gap) if has_gap.size else 0.0
    no_shift = ShiftScan(
        row_fraction=row_fraction, gap=0.0, shifted_gap=0.0, shifted_median=0.0, shift=0
    )
    if not row_fraction:  # the usual case
        return no_shift
    tokens = finite_trained_tokens(record, "logp_old", name) & has_gap[row_numbers(record)]
    if np.count_nonzero(tokens) < MIN_TOKENS:
        return no_shift
    pairs = {shift: _shifted_gaps(record, name, tokens, shift) for shift in SHIFTS}
    usable_pairs = {shift: pair for shift, pair in pairs.items() if pair is not None}
    if not usable_pairs:
        return no_shift
    best_shift = min(
        usable_pairs,
        key=lambda shift: usable_pairs[shift][1] - MAX_REMAINING_FRACTION * usable_pairs[shift][0],
    )
    gap, shifted, middle = usable_pairs[best_shift]
    return ShiftScan(
        row_fraction=row_fraction,
        gap=gap,
        shifted_gap=shifted,
        shifted_median=middle,
        shift=best_shift,
    )


def _shifted_gaps(
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
    indices = np.flatnonzero(tokens[here] & (row[here] == row[there]) & finite[there])
    if indices.size < MIN_TOKENS:
        return None
    old, other = (
        float64_column(record, "logp_old")[there][indices],
        float64_column(record, name)[here][indices],
    )
    unshifted = np.abs(column_difference(record, "logp_old", name)[here][indices])
    shifted = np.abs(old - other)
    uncertain = shifted[np.minimum(old, other) < UNCERTAIN_LOGP]
    middle = median(uncertain) if len(uncertain) >= MIN_UNCERTAIN_TOKENS else np.inf
    return mean(unshifted), mean(shifted), middle


def filled_fraction_of(record: StepRecord, name: str) -> float:
    """Return the fraction of trained tokens with a log-prob of exactly 0 that were not certain.

    Counts the policy's tokens only: inserted tokens have no log-prob; wrong-loss-mask covers them.
    """
    trained = finite_trained_tokens(record, name)
    if record.emitted_by is not None:
        trained = trained & (record.emitted_by == EmittedBy.POLICY)
    num_trained = np.count_nonzero(trained)
    if not num_trained:
        return 0.0
    filled = (
        (float64_column(record, name) == 0)
        & (float64_column(record, "logp_old") < CERTAIN_LOGP)
        & trained
    )
    return float(np.count_nonzero(filled) / num_trained)


CHECK = Check(
    name="misaligned-logp",
    description="log-probs are stored at other tokens than their own",
    stage=Stage.ALIGNMENT,
    needs=("record.logp_old",),
    fix="Store the log-prob of token t at position t on every side: logits[:, :-1] belong to "
    "ids[:, 1:]; assert equal lengths, and use NaN with a mask for missing values, never 0.",
    judge=judge_case,
    optional_needs=("record.logp_sampler",),
    explains=(
        *("temperature-on-one-side", "wrong-reference", "stale-sampler", "imprecise-logp"),
        *("hidden-sampling-transform", "kl-tail-dominates", "stale-prefix-cache", "step-too-big"),
        "unexplained-gap",
        "gap-grows-with-position",
        "corrupted-sync",
    ),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.logp_ref",
        "record.token_ids",
        "record.entropy",
    ),
    not_recorded=(
        "the length of the logits before a gather: a shift or a fill shows in what was gathered"
    ),
)
