"""context-truncated: completions are truncated before they can end."""

from collections.abc import Sequence

import numpy as np

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
    warning_finding,
)
from klinic.checks.measures import tokens_per_row
from klinic.evidence.record import StepRecord

MAX_TRUNCATED_FRACTION = (
    0.8  # fraction of completions; a limit that truncates one in five is a choice
)
MAX_LEFT_OUT = 0.5  # of the truncated completions that are masked: their rewards then train nothing
NUM_STEPS = 2  # consecutive
MIN_GRADED_FRACTION = 0.1  # of the truncated completions that get more than the lowest reward
NUM_ERRORS = 2.0  # standard errors by which the completions that end may have got more


def judge_case(case: Case) -> Finding:
    """Flag a length limit that truncates most completions.

    Looks for
        The fraction of completions that reach the length limit without an end token, in two
        consecutive steps, and their length.
    Why it matters
        A truncated completion has no answer to grade: rewards measure the limit, and the policy
        learns to be short.
    Confirmed when
        Four of five completions are truncated.
    Ruled out when
        More of them end on their own, or did in the first step: then the policy has learned to
        write longer completions. It is that too if fewer were truncated in the first step and
        truncated completions get at least the reward of the others. It is a warning if they do
        now, and a tenth of all get more than the lowest reward: answers may have a fixed length.
        Where truncated completions are masked it is no warning: most rows then train nothing.
    Confused with
        stop-token-fault (rows end with an end token and yet count as truncated); random-weights
        (an untrained model never ends).
    """
    last = case.recent_records[-NUM_STEPS:]
    records = (*last, *(() if case.start is None else (case.start,)))
    if len(last) < NUM_STEPS or any(r.finish_reason is None or not r.num_tokens for r in records):
        return no_data_finding(f"{NUM_STEPS} steps with finish reasons needed")
    truncated_fraction = min(_truncated_fraction(record, case.run["eos_ids"]) for record in last)
    if truncated_fraction > MAX_TRUNCATED_FRACTION and case.start is not None:
        first = _truncated_fraction(case.start, case.run["eos_ids"])
        is_paid = first <= MAX_TRUNCATED_FRACTION and _is_truncation_paid(last)
        if first < MAX_TRUNCATED_FRACTION / 2 or is_paid:
            return passed_finding(
                f"{first:.0%} were truncated in the first step: they grew by training"
            )
    graded, left_out = _graded_fraction(case.recent_records), _left_out_fraction(last)
    if (
        left_out <= MAX_LEFT_OUT
        and truncated_fraction > MAX_TRUNCATED_FRACTION
        and graded >= MIN_GRADED_FRACTION
        and _is_truncation_paid(case.recent_records)
    ):
        return warning_finding(
            f"{truncated_fraction:.0%} have the largest length, {graded:.0%} get more than the "
            "lowest reward, and those that end get no more: answers of a fixed length?"
        )
    longest = int(np.diff(case.record.row_offsets).max())
    summary = (
        f"{truncated_fraction:.0%} of the completions were truncated without an end token (limit "
        f"{MAX_TRUNCATED_FRACTION:.0%}), the longest at {longest} tokens"
    )
    if left_out > MAX_LEFT_OUT:
        summary += f"; {left_out:.0%} of the truncated ones are masked: nothing trains on them"
    return (failed_finding if truncated_fraction > MAX_TRUNCATED_FRACTION else passed_finding)(
        summary, share=truncated_fraction, longest=float(longest)
    )


def _is_truncation_paid(records: Sequence[StepRecord]) -> bool:
    """Return whether truncated completions get at least the mean reward of the others."""
    if any(record.reward is None for record in records):
        return False
    reward = np.concatenate([np.asarray(record.reward, np.float64) for record in records])
    reasons = np.concatenate([np.asarray(record.finish_reason) for record in records])
    is_cut = (reasons == "length") & np.isfinite(reward)
    others = (reasons != "length") & np.isfinite(reward)
    if not is_cut.any() or not others.any():
        return bool(is_cut.any())
    error = float(reward[is_cut | others].std()) / np.sqrt(np.count_nonzero(others))
    return bool(reward[is_cut].mean() + NUM_ERRORS * error >= reward[others].mean())


def _left_out_fraction(records: Sequence[StepRecord]) -> float:
    """Return the fraction of the truncated completions without a token in the loss."""
    cut = np.concatenate([np.asarray(record.finish_reason) == "length" for record in records])
    masked = np.concatenate([tokens_per_row(r, r.loss_mask) == 0 for r in records])
    return float(masked[cut].mean()) if cut.any() else 0.0


def _graded_fraction(records: Sequence[StepRecord]) -> float:
    """Return the fraction of completions with more than the lowest reward of these steps."""
    if any(record.reward is None for record in records):
        return 0.0
    reward = np.concatenate([np.asarray(record.reward, np.float64) for record in records])
    finite = reward[np.isfinite(reward)]
    return float((finite > finite.min()).mean()) if finite.size else 0.0


def _truncated_fraction(record: StepRecord, eos_ids: list[int]) -> float:
    has_tokens = np.diff(record.row_offsets) > 0
    last = record.token_ids[(record.row_offsets[1:] - 1)[has_tokens]]
    truncated = np.asarray(record.finish_reason)[has_tokens] == "length"
    return (
        float((truncated & ~np.isin(last, np.asarray(eos_ids))).mean()) if truncated.any() else 0.0
    )


CHECK = Check(
    name="context-truncated",
    description="completions are truncated before they can end",
    stage=Stage.ALIGNMENT,
    needs=("record.finish_reason", "run.eos_ids"),
    fix="Raise sampling.max_new_tokens, shorten prompts, or train with shorter answers first.",
    judge=judge_case,
    change={"sampling.max_new_tokens": "twice as many"},
    explains=("equal-rewards", "malformed-output", "cliff-rewards", "step-too-big"),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.token_ids",
        "record.reward",
        "run.sampling",
    ),
)
