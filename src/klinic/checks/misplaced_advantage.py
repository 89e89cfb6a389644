"""misplaced-advantage: advantages per token lie at other tokens than those that are trained on."""

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
from klinic.checks.measures import row_numbers
from klinic.maths.arrays import segment_sum

MIN_ROW_FRACTION = 0.05  # of the rows with an advantage: a row of one token proves little
RELATIVE_ROUNDING = 1e-3  # of a row's largest advantage: bf16 leaves 4e-3 of a unit, float32 1e-7
ONE_PER_ROW = ("group_mean", "leave_one_out", "group_std", "batch")


def judge_case(case: Case) -> Finding:
    """Flag advantages per token that do not cover the trained tokens of their row.

    Looks for
        Rows in which some trained tokens have an advantage of 0 while others, or tokens that are
        not trained on, have one. And, for estimators with one advantage for a completion, rows
        whose trained tokens have different ones. Where turns have advantages of their own, one
        of 0 over a whole turn is a turn as good as its baseline.
    Why it matters
        Advantages are written at the tokens of the last turn, shifted by the prompt, cut at a
        tool's reply or averaged over padding: most tokens then have no signal, or another
        completion's, and the loss looks as small as usual.
    Confirmed when
        That is so in one of 20 rows that have an advantage.
    Ruled out when
        Every trained token of a row has the row's advantage.
    Confused with
        wrong-loss-mask (the mask itself is wrong); wrong-groups (every row has one advantage,
        and it is another group's).
    """
    record = case.record
    assert record.token_advantage is not None  # noqa: S101 - needed
    advantage = np.nan_to_num(np.asarray(record.token_advantage, np.float64))
    rows, mask = row_numbers(record), np.asarray(record.loss_mask)
    size = np.zeros(record.num_rows)
    np.maximum.at(size, rows, np.abs(advantage))
    tolerance = RELATIVE_ROUNDING * size[rows]
    is_zero = mask & (np.abs(advantage) <= tolerance)
    trained = segment_sum(mask.astype(np.float64), rows, record.num_rows)
    used = (size > 0) & (trained > 0)
    if not used.any():
        return no_data_finding("no row has an advantage and a trained token")
    is_one_per_row = case.run.get("advantage") in ONE_PER_ROW
    if not is_one_per_row and _is_by_turn(advantage, mask, rows, size):
        is_zero &= ~_in_zero_turn(is_zero, mask, rows)
    is_partial = used & (segment_sum(is_zero.astype(np.float64), rows, record.num_rows) > 0)
    is_uneven = used & ~is_partial & _has_several_values(advantage, mask, rows, size)
    wrong = is_partial | is_uneven if is_one_per_row else is_partial
    fraction = float(wrong[used].mean())
    kind = "have no advantage at some trained tokens"
    if is_one_per_row and is_uneven.sum() > is_partial.sum():
        kind = "have different advantages at their trained tokens"
    return (failed_finding if fraction > MIN_ROW_FRACTION else passed_finding)(
        f"{fraction:.0%} of the rows with an advantage {kind} (limit {MIN_ROW_FRACTION:.0%})",
        rows=fraction,
    )


def _is_by_turn(
    advantage: np.ndarray, mask: np.ndarray, rows: np.ndarray, size: np.ndarray
) -> bool:
    """Return whether rows have several advantages above 0 in size: turns have their own."""
    is_set = mask & (np.abs(advantage) > RELATIVE_ROUNDING * size[rows])
    several = _has_several_values(advantage, is_set, rows, size)[np.unique(rows[is_set])]
    return bool(several.size and several.mean() > MIN_ROW_FRACTION)


def _in_zero_turn(is_zero: np.ndarray, mask: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return which tokens are in a turn without an advantage: it was as good as its baseline."""
    begins = mask & ~np.concatenate([[False], mask[:-1] & (rows[1:] == rows[:-1])])
    turn = np.cumsum(begins)
    num = int(turn.max(initial=0)) + 1
    is_all_zero = np.bincount(turn[mask], ~is_zero[mask], num) == 0
    return np.asarray(mask & is_all_zero[turn])


def _has_several_values(
    advantage: np.ndarray, mask: np.ndarray, rows: np.ndarray, size: np.ndarray
) -> np.ndarray:
    low, high = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(low, rows[mask], advantage[mask])
    np.maximum.at(high, rows[mask], advantage[mask])
    return np.asarray(high - low > RELATIVE_ROUNDING * size)


CHECK = Check(
    name="misplaced-advantage",
    description="advantages per token lie at other tokens than those that are trained on",
    stage=Stage.ADVANTAGE,
    needs=("record.token_advantage",),
    fix="Write a completion's advantage at every token that its loss mask selects, in all turns, "
    "and at no other.",
    judge=judge_case,
    is_of_setup=True,
    explains=("policy-does-not-move", "policy-gradient-wrong"),
    reads=("record.loss_mask", "record.row_offsets", "run.advantage"),
)
