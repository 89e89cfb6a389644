"""Ids that replaced the sampled ones, found by the gap between sampler and learner alone.

A tokenizer that folds characters writes ids that the policy hardly ever samples. A row agrees up to
its first such id, the learner is surprised by that, and scores the rest after another text. Rows
without such an id agree throughout.
"""

from dataclasses import dataclass

import numpy as np

from klinic.checks.measures import column_difference, finite_trained_tokens, row_numbers
from klinic.evidence.record import StepRecord

AGREES = 0.1  # nats: of a token with its own id
MIN_SURPRISE = 2.0  # nats, median, by which the learner gives the first such ids less
MIN_REST = 0.3  # nats, mean after them: the text before these tokens is another one
MIN_ROWS = 8  # with a gap, and without one
MAX_ID_FRACTION = 0.5  # of the different ids of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedIds:
    """The ids at which rows stop to agree."""

    ids: tuple[int, ...]
    rows: int
    """Rows with a gap; it begins at one of these ids in each."""
    surviving: int
    """Rows without a gap, which have none of these ids."""
    surprise: float


def find_folded_ids(record: StepRecord) -> FoldedIds | None:
    """Return the ids that replaced others, or None."""
    if record.logp_sampler is None or record.logp_old is None:
        return None
    used = finite_trained_tokens(record, "logp_sampler", "logp_old")
    excess = column_difference(record, "logp_sampler", "logp_old")
    rows, ids = row_numbers(record), np.asarray(record.token_ids)
    places = np.flatnonzero(used & (np.abs(excess) > AGREES))
    with_gap, index = np.unique(rows[places], return_index=True)
    surviving = np.setdiff1d(np.unique(rows[used]), with_gap)
    if min(len(with_gap), len(surviving)) < MIN_ROWS:
        return None
    first = places[index]
    folded = np.unique(ids[first])
    is_rare = len(folded) <= MAX_ID_FRACTION * len(np.unique(ids[used]))
    is_absent = not np.isin(ids[used & np.isin(rows, surviving)], folded).any()
    starts = np.full(record.num_rows, record.num_tokens)
    starts[with_gap] = first
    rest = used & (np.arange(record.num_tokens) > starts[rows])
    surprise = float(np.median(excess[first]))
    goes_on = rest.any() and float(np.abs(excess[rest]).mean()) > MIN_REST
    if not (is_rare and is_absent and goes_on and surprise > MIN_SURPRISE):
        return None
    return FoldedIds(
        ids=tuple(folded.tolist()),
        rows=len(with_gap),
        surviving=len(surviving),
        surprise=surprise,
    )
