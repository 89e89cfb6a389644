"""wrong-groups: rewards are compared across prompts."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed

SHARE = 0.01  # of a group's absolute advantages; float32 leaves 1e-6
CENTRED = ("group_mean", "leave_one_out", "group_std")


def judge(case: Case) -> Finding:
    """Flag advantages that do not sum to 0 within the group of their prompt.

    Looks for
        The sum of the advantages of each group over the sum of their sizes. Rewards less a mean of
        their own group sum to 0, whatever the group's size and spread.
    Why it matters
        Completions are praised for having an easy prompt. Groups of equal rewards get a gradient,
        and those that could teach something get another one's.
    Confirmed when
        A group's sum is above 1% of its absolute advantages.
    Ruled out when
        Every group sums to 0.
    Confused with
        advantage-explodes (groups sum to 0, single advantages are impossible); broken-reward (the
        advantages fit the rewards, which are wrong).
    """
    record = case.record
    if case.run["advantage"] not in CENTRED:
        return no_data(f"advantage {case.run['advantage']} does not sum to 0 within groups")
    assert record.advantage is not None  # noqa: S101 - needed
    used = np.isfinite(record.advantage)
    if record.reward is not None:
        used &= np.isfinite(record.reward)
    groups = record.group[used]
    sums = np.bincount(groups, weights=record.advantage[used], minlength=1)
    sizes = np.bincount(groups, weights=np.abs(record.advantage[used]), minlength=1)
    share = float(np.max(np.abs(sums) / np.maximum(sizes, 1e-12))) if sizes.any() else 0.0
    summary = f"a group's advantages sum to {share:.2%} of their size (limit {SHARE:.0%})"
    return (failed if share > SHARE else passed)(summary, share=share)


CHECK = Check(
    name="wrong-groups",
    stage=Stage.ADVANTAGE,
    needs=("record.advantage", "run.advantage"),
    fix="Group rewards by the id of their prompt, not by their place in the batch.",
    judge=judge,
)
