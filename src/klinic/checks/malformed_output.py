"""malformed-output: completions contain no answer, so rewards have nothing to grade."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed

SHARE = 0.2  # min fraction of completions with an answer, correct or not
STEPS = 3
RATE = "completions/parse_rate"


def judge(case: Case) -> Finding:
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
    steps = sorted(step for step, line in case.metrics.items() if line.get(RATE) is not None)
    if len(steps) < STEPS:
        return no_data(f"{len(steps)} steps, {STEPS} needed")
    rates = [float(case.metrics[step][RATE]) for step in steps[-STEPS:]]
    most = float(np.max(rates))
    summary = f"at most {most:.0%} of the completions contain an answer (limit {SHARE:.0%})"
    return (failed if most < SHARE else passed)(summary, share=most)


CHECK = Check(
    name="malformed-output",
    stage=Stage.ADVANTAGE,
    needs=(f"metrics.{RATE}",),
    fix="Teach the answer format: the model's own chat template, an example in the prompt, or a "
    "warm start; and give partial credit for the format.",
    judge=judge,
    explains=("equal-rewards", "cliff-rewards", "step-too-big"),
)
