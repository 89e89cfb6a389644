"""malformed-output: completions are not answers, so rewards have nothing to grade."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed

SHARE = 0.2  # of the completions that must be answers of some kind, right or wrong
STEPS = 3
RATE = "completions/parse_rate"


def judge(case: Case) -> Finding:
    """Flag completions that the task cannot read.

    Looks for
        The share of completions in which an answer is found at all, over the last three steps.
    Why it matters
        A base model, another chat template, a missing example of the form: nothing can be graded,
        and the penalty for it is all that is learnt from.
    Confirmed when
        Fewer than one in five can be read in three steps.
    Ruled out when
        More of them can.
    Confused with
        random-weights (entropy is that of knowing nothing); context-truncated (answers would come
        behind the limit); broken-reward (answers are there and are graded wrongly).
    """
    steps = sorted(step for step, line in case.metrics.items() if line.get(RATE) is not None)
    if len(steps) < STEPS:
        return no_data(f"{len(steps)} steps, and {STEPS} are needed")
    rates = [float(case.metrics[step][RATE]) for step in steps[-STEPS:]]
    most = float(np.max(rates))
    summary = f"at most {most:.0%} of the completions hold an answer (limit {SHARE:.0%})"
    return (failed if most < SHARE else passed)(summary, share=most)


CHECK = Check(
    name="malformed-output",
    stage=Stage.ADVANTAGE,
    needs=(f"metrics.{RATE}",),
    fix="Show the form: the model's own prompt format, an example in the prompt, or a warm start; "
    "and give part of the reward for it.",
    judge=judge,
    explains=("equal-rewards", "cliff-rewards", "step-too-big"),
)
