"""malformed-output: completions contain no answer, so rewards have nothing to grade."""

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

MIN_PARSED_FRACTION = 0.2  # min fraction of completions with an answer, correct or not
NUM_STEPS = 3
PARSE_RATE = "completions/parse_rate"


def judge_case(case: Case) -> Finding:
    """Flag completions that the task cannot parse.

    Looks for
        The fraction of completions that contain a parsable answer, over the last three steps.
    Why it matters
        A base model, another chat template, a missing format example: nothing can be graded,
        and the format penalty is the only training signal.
    Confirmed when
        Fewer than one in five can be parsed in three steps.
    Ruled out when
        More of them can.
    Confused with
        random-weights (entropy is close to uniform); context-truncated (answers would come
        after the limit); broken-reward (answers are present and graded wrongly).
    """
    steps = sorted(step for step, line in case.metrics.items() if line.get(PARSE_RATE) is not None)
    if len(steps) < NUM_STEPS:
        return no_data_finding(f"{len(steps)} steps, {NUM_STEPS} needed")
    rates = [float(case.metrics[step][PARSE_RATE]) for step in steps[-NUM_STEPS:]]
    highest_rate = float(np.max(rates))
    summary = (
        f"at most {highest_rate:.0%} of the completions contain "
        f"an answer (limit {MIN_PARSED_FRACTION:.0%})"
    )
    return (failed_finding if highest_rate < MIN_PARSED_FRACTION else passed_finding)(
        summary, share=highest_rate
    )


CHECK = Check(
    name="malformed-output",
    description="completions contain no answer, so rewards have nothing to grade",
    stage=Stage.ADVANTAGE,
    needs=(f"metrics.{PARSE_RATE}",),
    fix="Teach the answer format: the model's own chat template, an example in the prompt, or a "
    "warm start; and give partial credit for the format.",
    judge=judge_case,
    explains=("equal-rewards", "cliff-rewards", "step-too-big"),
    reads=("record.reward",),
)
