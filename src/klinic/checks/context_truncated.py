"""context-truncated: completions are truncated before they can end."""

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
from klinic.evidence.record import StepRecord

MAX_TRUNCATED_FRACTION = (
    0.8  # fraction of completions; a limit that truncates one in five is a choice
)
NUM_STEPS = 2  # consecutive


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
        write longer completions.
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
        if first < MAX_TRUNCATED_FRACTION / 2:
            return passed_finding(
                f"{first:.0%} were truncated in the first step: they grew by training"
            )
    longest = int(np.diff(case.record.row_offsets).max())
    summary = (
        f"{truncated_fraction:.0%} of the completions were truncated without an end token (limit "
        f"{MAX_TRUNCATED_FRACTION:.0%}), the longest at {longest} tokens"
    )
    return (failed_finding if truncated_fraction > MAX_TRUNCATED_FRACTION else passed_finding)(
        summary, share=truncated_fraction, longest=float(longest)
    )


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
        "run.sampling",
    ),
)
