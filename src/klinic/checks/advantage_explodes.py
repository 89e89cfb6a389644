"""advantage-explodes: rewards are divided by a standard deviation close to 0."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed_finding, passed_finding

MAX_BOUND_RATIO = 1.01  # rounding of rewards stored in float32
DIVIDING_ADVANTAGES = ("group_std", "batch")


def judge_case(case: Case) -> Finding:
    """Flag advantages that no group of that size can have.

    Looks for
        The largest advantage of each group, against the bound that division by the group's own
        standard deviation implies: for n rewards, at most sqrt(n - 1) with the deviation over
        n, and (n - 1) / sqrt(n) with the one over n - 1.
    Why it matters
        One completion with an advantage of hundreds dominates the gradient of its step. After
        gradient clipping, the only visible symptom is a jump of the KL.
    Confirmed when
        An advantage is above sqrt(n - 1): its standard deviation excludes the completion
        itself, is rounding noise, or has no floor.
    Ruled out when
        All advantages are within the bound of their group.
    Confused with
        wrong-groups (advantages do not sum to 0 within a group, and no single one is
        impossible); rewards that are large and not divided (then there is no bound).
    """
    record = case.record
    if case.run["advantage"] not in DIVIDING_ADVANTAGES:
        return passed_finding(
            f"advantage {case.run['advantage']} is not divided by a standard deviation"
        )
    assert record.advantage is not None  # noqa: S101 - needed
    sizes = np.bincount(record.group)[record.group]
    num_rows = len(record.group) if case.run["advantage"] == "batch" else sizes
    bound = np.sqrt(np.maximum(num_rows - 1, 1))
    bound_ratio = float(np.nanmax(np.abs(record.advantage) / bound))
    summary = (
        f"the largest advantage is {bound_ratio:.3g} times the "
        f"bound of its group (limit {MAX_BOUND_RATIO:g})"
    )
    return (failed_finding if bound_ratio > MAX_BOUND_RATIO else passed_finding)(
        summary, share_of_bound=bound_ratio
    )


CHECK = Check(
    name="advantage-explodes",
    description="rewards are divided by a standard deviation close to 0",
    stage=Stage.ADVANTAGE,
    needs=("record.advantage", "record.group", "run.advantage"),
    fix="Do not divide by the standard deviation (learner.advantage leave_one_out) or add a floor.",
    judge=judge_case,
    change={"learner.advantage": "leave_one_out"},
    explains=("wrong-groups",),  # a leave-one-out deviation also leaves a nonzero sum
    reads=(
        "record.reward",
        "run.group_size",
    ),
)
