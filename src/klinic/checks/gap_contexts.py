"""Evidence on a gap from contexts: tokens sampled after the same context, and turns of a row.

Completions of one prompt share their first tokens. Two tokens that were sampled after the same
context come from one distribution, so whatever a side adds to all log-probs of a distribution
cancels in their difference.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float, Int

from klinic.checks.gap_tokens import GapTokens
from klinic.evidence.record import StepRecord

MIN_PAIRS = 8  # differences of two tokens after the same context
MIN_SPREAD = 0.3  # nats between two tokens of a context: closer ones show rounding
NOISE = 0.03  # nats, root mean square of bf16 against fp32
MIN_UNCERTAINTY = 0.2  # nats of entropy: below it gap and entropy are rounding
MIN_UNCERTAIN_TOKENS = 30
MAX_PROPORTION = 0.97  # least ratio of low to high proportions, for a temperature near 1
BOUNDARY = 8  # tokens on each side of the end of a turn
MIN_JUMP = 3.0  # times the gap at the end of the first turn, where the next one begins


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSlope:
    """The line of the gap over the learner's log-prob, among tokens of the same contexts."""

    slope: float
    explained: float
    """Fraction of the squared differences of gaps that it explains."""
    num_pairs: int
    """Independent differences: distinct tokens less contexts."""


def context_slope(tokens: GapTokens) -> ContextSlope | None:
    """Return the line among tokens of the same contexts; None without enough of them."""
    if (context := _shared_contexts(tokens)) is None:
        return None
    shared = context >= 0
    # a token that several rows sampled after a context has one log-prob
    _, first = np.unique(np.stack([context[shared], tokens.ids[shared]]), axis=1, return_index=True)
    chosen = np.flatnonzero(shared)[first]
    logp, gap = (_centred(values[chosen], context[chosen]) for values in (tokens.logp, tokens.gap))
    used = np.abs(logp) > MIN_SPREAD / 2
    num_pairs = int(np.count_nonzero(used)) - np.unique(context[chosen][used]).size
    if num_pairs < MIN_PAIRS:
        return None
    slope = float(np.sum(logp * gap) / np.sum(logp**2))
    noise = gap.size * NOISE**2
    rest, total = float(np.sum((gap - slope * logp) ** 2)), float(np.sum(gap**2))
    return ContextSlope(
        slope=slope,
        explained=max(0.0, 1 - rest / total) if total > noise else 0.0,
        num_pairs=num_pairs,
    )


def _centred(values: Float[np.ndarray, "K"], context: Int[np.ndarray, "K"]) -> np.ndarray:
    """Return the values less the mean of their context."""
    _, inverse = np.unique(context, return_inverse=True)
    means = np.bincount(inverse, values) / np.bincount(inverse)
    return np.asarray(values - means[inverse])


def _shared_contexts(tokens: GapTokens) -> Int[np.ndarray, "K"] | None:
    """Return the number of each token's context; -1 where one row alone has that context."""
    record = tokens.record
    if record.prompt_ids is None or record.prompt_offsets is None:
        return None
    of_token = np.full(record.token_ids.size, -1, np.int64)
    context = _prompt_numbers(record)
    starts, lengths = record.row_offsets[:-1], np.diff(record.row_offsets)
    rows = np.arange(record.num_rows)
    base = 0
    for position in range(int(lengths.max(initial=0))):
        rows = rows[lengths[rows] > position]
        _, number, count = np.unique(context[rows], return_inverse=True, return_counts=True)
        rows, number = rows[count[number] > 1], number[count[number] > 1]
        if not rows.size:
            break
        at = starts[rows] + position
        of_token[at] = base + number
        base += int(number.max()) + 1
        pairs = np.stack([number, np.asarray(record.token_ids[at], np.int64)])
        context[rows] = np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)
    return np.asarray(of_token[tokens.index])


def _prompt_numbers(record: StepRecord) -> Int[np.ndarray, "B"]:
    """Return a number for each row, equal for equal prompts."""
    assert record.prompt_ids is not None  # noqa: S101 - the caller has prompts
    assert record.prompt_offsets is not None  # noqa: S101 - recorded together
    offsets = record.prompt_offsets.tolist()
    number_of: dict[bytes, int] = {}
    return np.array(
        [
            number_of.setdefault(record.prompt_ids[start:end].tobytes(), len(number_of))
            for start, end in pairwise(offsets)
        ],
        np.int64,
    )


def is_proportional(tokens: GapTokens) -> bool:
    """Return whether gaps are nearly proportional to the entropies of uncertain tokens.

    For p^(1/T) without its normaliser, their ratio lies below 1/T - 1, the nearer the flatter p is
    and the smaller 1/T - 1. Of truncations, top-p 0.6 comes nearest: a ratio of 0.22 spreads by
    half, where that of a temperature spreads by a sixth.
    """
    assert tokens.entropy is not None  # noqa: S101 - the caller has entropies
    uncertain = tokens.entropy > MIN_UNCERTAINTY
    if np.count_nonzero(uncertain) < MIN_UNCERTAIN_TOKENS:
        return False
    ratio = np.abs(tokens.gap[uncertain]) / tokens.entropy[uncertain]
    low, middle, high = np.quantile(ratio, (0.1, 0.5, 0.9))
    return bool(low >= (MAX_PROPORTION - middle) * high)


def jumps_between_turns(tokens: GapTokens, later: Bool[np.ndarray, "K"]) -> bool:
    """Return whether the gap begins with the second turn, and not within the first one."""
    ends, begins = [], []
    for row in np.unique(tokens.row[later]):
        first = tokens.gap[(tokens.row == row) & ~later]
        second = tokens.gap[(tokens.row == row) & later]
        ends.append(first[-BOUNDARY:])
        begins.append(second[:BOUNDARY])
    end, begin = (np.concatenate(parts) if parts else np.zeros(0) for parts in (ends, begins))
    if not end.size or not begin.size:
        return False
    return bool(np.mean(begin**2) > MIN_JUMP**2 * np.mean(end**2))
