"""context-truncated: completions are cut off before they can end."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.evidence.record import StepRecord

SHARE = 0.8  # of the completions; a limit that cuts off one in five is a choice
STEPS = 2  # in a row


def judge(case: Case) -> Finding:
    """Flag a limit that hardly any completion fits into.

    Looks for
        The share of completions that ran into the length limit, without an end token, in two
        steps in a row, and how long they are.
    Why it matters
        A completion without its end has no answer to be judged: rewards measure the limit, and
        what the policy learns is to be short.
    Confirmed when
        Four of five are cut off.
    Ruled out when
        More of them end by themselves, or did in the first step: then the policy has learnt to
        be long.
    Confused with
        stop-token-fault (rows end with an end token and yet count as cut off); random-weights (a
        model that knows nothing never ends).
    """
    last = case.window[-STEPS:]
    looked = (*last, *(() if case.start is None else (case.start,)))
    if len(last) < STEPS or any(r.finish_reason is None or not r.num_tokens for r in looked):
        return no_data(f"{STEPS} steps with finish reasons are needed")
    share = min(_cut_off(record, case.run["eos_ids"]) for record in last)
    if share > SHARE and case.start is not None:
        first = _cut_off(case.start, case.run["eos_ids"])
        if first < SHARE / 2:
            return passed(f"{first:.0%} were cut off in the first step: they grew by training")
    longest = int(np.diff(case.record.row_offsets).max())
    summary = (
        f"{share:.0%} of the completions were cut off without an end (limit {SHARE:.0%}), the "
        f"longest at {longest} tokens"
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
