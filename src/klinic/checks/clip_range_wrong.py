"""clip-range-wrong: the clip range ends the update of tokens that have hardly moved."""

from collections.abc import Mapping
from typing import Any

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
from klinic.checks.measures import finite_trained_tokens, float64_column

MIN_RANGE = 1e-3  # of the ratio of a token: no published recipe is below 0.1
PER_TOKEN = ("grpo", "dr_grpo", "bnpo", "dapo")  # losses that clip the ratio of each token
MAX_CLIPPED = 0.3  # of the trained tokens: the advantages of half of them ask for a clip
MOVED = 1e-7  # of the ratio: float32 leaves less on policy
MIN_MOVED = 0.5  # of the tokens
SMALL_MOVE = 0.05  # of the ratio, of 99% of the tokens: half of the narrowest range in use
QUANTILE = 0.99


def judge_case(case: Case) -> Finding:
    """Flag a clip range that leaves no room for an update.

    Looks for
        The clip range that the run declares, and the fraction of tokens whose ratio is outside
        it; or, without one, the logged fraction of clipped tokens, and how far the ratios are
        from 1.
    Why it matters
        A range of 1e-6 looks like one of 0.2 in a config. From the second update on a generation,
        every token with the right direction is clipped: the rest of the update is noise and the
        KL term, and a clip fraction near 1 is taken for a learning rate that is too high.
    Confirmed when
        The loss clips the ratio of each token, the declared range is below 0.001, and half of
        the tokens are outside it; or three in ten are logged as clipped, while 99% of the ratios
        are within 0.05 of 1, and the declared range, if any, has hardly one outside.
    Ruled out when
        The declared range is wider and fits the logged fraction, or no ratio differs from 1: the
        range then changes nothing.
    Confused with
        step-too-big (ratios are far from 1); policy-does-not-move (nothing is clipped, and the
        gradient is 0).
    """
    moved = _ratio_distance(case)
    if not moved.size:
        return no_data_finding("no trained token has a log-prob before and in the update")
    declared, is_per_token = _declared_range(case.run.get("loss"))
    if is_per_token and declared is not None and declared < MIN_RANGE:
        return _judge_narrow(moved, declared)
    clipped = case.metrics.get(case.record.step, {}).get("clip_ratio")
    if not isinstance(clipped, int | float) or not is_per_token:
        if declared is None:
            return no_data_finding("not recorded: `run.loss`, or `metrics.clip_ratio` with it")
        return passed_finding(f"the clip range is {declared:g} (limit {MIN_RANGE:g})")
    near = float(np.quantile(moved, QUANTILE))
    outside = 0.0 if declared is None else float((moved > declared).mean())
    summary = (
        f"{clipped:.0%} of the tokens are logged as clipped (limit {MAX_CLIPPED:.0%}), and "
        f"{QUANTILE:.0%} of the ratios are within {near:.3g} of 1 (limit {SMALL_MOVE:g})"
    )
    is_fault = clipped > MAX_CLIPPED and near < SMALL_MOVE and outside < MAX_CLIPPED / 2
    return (failed_finding if is_fault else passed_finding)(summary, clipped=float(clipped))


def _judge_narrow(moved: np.ndarray, declared: float) -> Finding:
    outside = float((moved > declared).mean())
    summary = (
        f"the clip range is {declared:g} (limit {MIN_RANGE:g}), and {outside:.0%} of the ratios "
        f"are outside it (limit {MIN_MOVED:.0%})"
    )
    if float((moved > MOVED).mean()) < MIN_MOVED:
        return passed_finding(f"{summary}: on policy, the ratio is 1 and no range changes it")
    is_fault = outside > MIN_MOVED
    return (failed_finding if is_fault else passed_finding)(summary, outside=outside)


def _ratio_distance(case: Case) -> np.ndarray:
    """Return the distance of the ratio from 1 at the trained tokens."""
    record = case.record
    used = finite_trained_tokens(record, "logp", "logp_old")
    log_ratio = float64_column(record, "logp")[used] - float64_column(record, "logp_old")[used]
    return np.asarray(np.abs(np.expm1(np.clip(log_ratio, -20.0, 20.0))))


def _declared_range(loss: object) -> tuple[float | None, bool]:
    """Return the smaller side of the declared range, and whether the loss clips each token."""
    if not isinstance(loss, Mapping) or loss.get("overridden"):
        return None, False
    sides: list[Any] = [loss.get("clip_low"), loss.get("clip_high")]
    known = [float(side) for side in sides if isinstance(side, int | float) and side >= 0]
    return min(known, default=None), loss.get("name", PER_TOKEN[0]) in PER_TOKEN


CHECK = Check(
    name="clip-range-wrong",
    description="the clip range ends the update of tokens that have hardly moved",
    stage=Stage.WIRING,
    needs=("record.logp", "record.logp_old", "run.loss"),
    fix="Set the clip range to 0.2, or 0.2 and 0.28: it is a distance of the ratio from 1, no "
    "epsilon of rounding.",
    judge=judge_case,
    reads=("record.loss_mask", "metrics.clip_ratio"),
)
