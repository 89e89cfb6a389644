"""equal-rewards: groups of equal rewards carry no training signal."""

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
from klinic.checks.measures import finite_group_rewards, trains_on_teacher_alone, whole_groups
from klinic.evidence.record import StepRecord

MAX_EQUAL_FRACTION = 0.9  # fraction of groups; half is usual, and some runs resample such groups
NUM_STEPS = 3  # consecutive: a single step can be chance
MIN_SOLVED_FRACTION = 0.8  # of the equal groups, which have the highest reward of the run


def judge_case(case: Case) -> Finding:
    """Flag steps in which hardly any group has two different rewards.

    Looks for
        The fraction of groups whose rewards are all equal, over the last three steps, and the
        mean reward. Groups with fewer rows than the group size are left out.
    Why it matters
        An advantage is a difference within a group. Without a difference, the gradient is 0
        except for the KL term: loss 0, no learning, and no error anywhere.
    Confirmed when
        Nine of ten groups have equal rewards in three consecutive steps.
    Ruled out when
        More than one in ten groups has different rewards. It is a warning if the groups are
        equal at the highest reward of the run and the first step had lower ones: the task is
        solved.
    Confused with
        policy-does-not-move (advantages are not 0, the gradient is); broken-reward (rewards are
        missing or wrong); broken-sampler (completions are equal, and so are their rewards).
    """
    if trains_on_teacher_alone(case):
        return passed_finding("the loss has no rewards: the KL to a teacher replaces them")
    last = case.recent_records[-NUM_STEPS:]
    if len(last) < NUM_STEPS:
        return no_data_finding(f"{len(last)} steps, {NUM_STEPS} needed")
    fractions = [equal_reward_fraction(record, whole_groups(case, record)) for record in last]
    if any(fraction is None for fraction in fractions):
        return no_data_finding("no rewards, groups of size 1, or no group with all of its rows")
    least = min(fraction for fraction in fractions if fraction is not None)
    rewards = np.concatenate([r.reward for r in last if r.reward is not None])
    which_groups = "all groups" if least == 1 else f"at least {least:.0%} of the groups"
    summary = (
        f"{which_groups} had equal rewards in {NUM_STEPS} steps (limit "
        f"{MAX_EQUAL_FRACTION:.0%}); the mean reward is {np.nanmean(rewards):.3g}"
    )
    if least <= MAX_EQUAL_FRACTION:
        return passed_finding(summary, share=least)
    if _is_solved(case, last):
        return warning_finding(f"{summary}, the highest of the run: the task is solved")
    return failed_finding(summary, share=least)


def _is_solved(case: Case, last: Sequence[StepRecord]) -> bool:
    """Return whether most equal groups have the highest reward, and training has raised it."""
    if case.start is None or case.start.reward is None:
        return False
    groups = [group for record in last for group in finite_group_rewards(record) if group.size]
    highest = max(float(np.nanmax(case.start.reward)), *(float(g.max()) for g in groups))
    at_highest = [bool((group >= highest).all()) for group in groups]
    now = float(np.mean([group.mean() for group in groups]))
    has_risen = now > float(np.nanmean(case.start.reward))
    return has_risen and float(np.mean(at_highest)) >= MIN_SOLVED_FRACTION


def equal_reward_fraction(record: StepRecord, is_whole: np.ndarray) -> float | None:
    """Return the fraction of whole groups with equal rewards; None if none can be compared."""
    if record.reward is None:
        return None
    used = is_whole & np.isfinite(record.reward)
    reward = np.asarray(record.reward, np.float64)[used]
    _, number, sizes = np.unique(record.group[used], return_inverse=True, return_counts=True)
    low, high = np.full(sizes.size, np.inf), np.full(sizes.size, -np.inf)
    np.minimum.at(low, number, reward)
    np.maximum.at(high, number, reward)
    comparable = sizes > 1
    return float((low == high)[comparable].mean()) if comparable.any() else None


CHECK = Check(
    name="equal-rewards",
    description="groups of equal rewards carry no training signal",
    stage=Stage.ADVANTAGE,
    needs=("record.reward",),
    fix="Use easier or harder prompts, larger groups or graduated rewards, or resample other "
    "prompts (loop.extra_rounds); check the verifier on correct answers.",
    judge=judge_case,
    change={"loop.extra_rounds": 2},
    explains=("cliff-rewards",),
    is_symptom=True,
    reads=(
        "record.advantage",
        "record.group",
        "run.group_size",
        "facts.grad_norm",
    ),
)
