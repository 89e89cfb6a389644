"""Ids that replaced the sampled ones, found by the gap between sampler and learner alone.

A tokenizer that folds characters writes ids that the policy hardly ever samples. A row agrees up to
its first such id, the learner is surprised by that, and scores the rest after another text. Rows
without such an id agree throughout. Rows are compared with those of their own prompt: what two
prompts share is not kept when a run is redacted.
"""

from dataclasses import dataclass

import numpy as np

from klinic.checks.measures import column_difference, finite_trained_tokens, row_numbers
from klinic.evidence.record import StepRecord

AGREES = 0.1  # nats: of a token with its own id
MIN_SURPRISE = 2.0  # nats, median, by which the learner gives the first such ids less
MIN_REST = 0.3  # nats, mean after them: the text before these tokens is another one
MIN_ROWS = 8  # with a gap, and without one
MAX_ID_FRACTION = 0.5  # of the different ids of each prompt, in its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedIds:
    """Rows that stop to agree at ids which the other rows of their prompt do not have."""

    rows: int
    """Rows with a gap."""
    surviving: int
    """Rows without a gap, of the same prompts."""
    surprise: float


def find_folded_ids(record: StepRecord) -> FoldedIds | None:
    """Return the ids that replaced others, or None."""
    if record.logp_sampler is None or record.logp_old is None:
        return None
    used = finite_trained_tokens(record, "logp_sampler", "logp_old")
    excess = column_difference(record, "logp_sampler", "logp_old")
    rows = row_numbers(record)
    places = np.flatnonzero(used & (np.abs(excess) > AGREES))
    with_gap, index = np.unique(rows[places], return_index=True)
    compared = used & np.isin(record.group[rows], record.group[with_gap])
    surviving = np.setdiff1d(np.unique(rows[compared]), with_gap)
    if min(len(with_gap), len(surviving)) < MIN_ROWS:
        return None
    first = places[index]
    ids = _ids_by_prompt(record)
    folded = np.unique(ids[first])
    is_rare = len(folded) <= MAX_ID_FRACTION * len(np.unique(ids[compared]))
    is_absent = not np.isin(ids[compared & np.isin(rows, surviving)], folded).any()
    starts = np.full(record.num_rows, record.num_tokens)
    starts[with_gap] = first
    rest = used & (np.arange(record.num_tokens) > starts[rows])
    surprise = float(np.median(excess[first]))
    goes_on = rest.any() and float(np.abs(excess[rest]).mean()) > MIN_REST
    if not (is_rare and is_absent and goes_on and surprise > MIN_SURPRISE):
        return None
    return FoldedIds(rows=len(with_gap), surviving=len(surviving), surprise=surprise)


def _ids_by_prompt(record: StepRecord) -> np.ndarray:
    """Return a number for every token: equal for equal ids of one prompt, and for no others."""
    pairs = np.stack([record.group[row_numbers(record)], record.token_ids], axis=1)
    numbers: np.ndarray = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    return numbers
