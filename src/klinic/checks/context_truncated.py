"""context-truncated: completions are truncated before they can end."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.evidence.record import StepRecord

SHARE = 0.8  # fraction of completions; a limit that truncates one in five is a choice
STEPS = 2  # consecutive


def judge(case: Case) -> Finding:
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
    last = case.window[-STEPS:]
    looked = (*last, *(() if case.start is None else (case.start,)))
    if len(last) < STEPS or any(r.finish_reason is None or not r.num_tokens for r in looked):
        return no_data(f"{STEPS} steps with finish reasons needed")
    share = min(_cut_off(record, case.run["eos_ids"]) for record in last)
    if share > SHARE and case.start is not None:
        first = _cut_off(case.start, case.run["eos_ids"])
        if first < SHARE / 2:
            return passed(f"{first:.0%} were truncated in the first step: they grew by training")
    longest = int(np.diff(case.record.row_offsets).max())
    summary = (
        f"{share:.0%} of the completions were truncated without an end token (limit "
        f"{SHARE:.0%}), the longest at {longest} tokens"
    )
    return (failed if share > SHARE else passed)(summary, share=share, longest=float(longest))


def _cut_off(record: StepRecord, eos_ids: list[int]) -> float:
    has_tokens = np.diff(record.row_offsets) > 0
    last = record.token_ids[(record.row_offsets[1:] - 1)[has_tokens]]
    cut = np.asarray(record.finish_reason)[has_tokens] == "length"
    return float((cut & ~np.isin(last, np.asarray(eos_ids))).mean()) if cut.any() else 0.0


CHECK = Check(
    name="context-truncated",
    stage=Stage.ALIGNMENT,
    needs=("record.finish_reason", "run.eos_ids"),
    fix="Raise sampling.max_new_tokens, shorten prompts, or train with shorter answers first.",
    judge=judge,
    change={"sampling.max_new_tokens": "twice as many"},
    explains=("equal-rewards", "malformed-output", "cliff-rewards", "step-too-big"),
)
