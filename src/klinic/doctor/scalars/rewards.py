"""Checks of rewards and completions: missing, all equal, or cut off."""

import math
from collections.abc import Sequence

from klinic.doctor.scalars.check import (
    STREAK_LENGTH,
    ScalarCheck,
    ScalarFinding,
    apply_test,
    fail,
    finite_values,
    first_streak,
    format_number,
    is_finite,
    no_data,
    ok,
    warn,
)
from klinic.evidence.readers.log import ScalarLog

MISSING = 0.2  # of the logged steps, as of the completions in `checks/broken_reward.py`
EQUAL = 0.9  # of the groups, as in `checks/equal_rewards.py`
LEARNT = 0.1  # rise as a fraction of the reward: a solved task has equal rewards
CUT_OFF = 0.95  # of the completions; with tokens, `checks/context_truncated.py` uses 0.8
GREW = 0.4  # cut off at the start: below it, completions grew in training
SAME = 0.5  # of the completions repeat another of their group


def missing_rewards(log: ScalarLog) -> ScalarFinding:
    """Look for steps in which no completion got a reward, or one got an infinite reward."""
    column = log.column("reward")
    lost = [index for index, v in enumerate(column) if v is not None and not math.isfinite(v)]
    logged = sum(value is not None for value in column)
    if not logged:
        return no_data("not logged: reward")
    share = len(lost) / logged
    if not lost:
        return ok(f"rewards are finite in all {logged} steps that have one")
    infinite = [index for index in lost if math.isinf(float(column[index] or 0.0))]
    if infinite:
        step = log.steps[infinite[0]]
        message = f"the mean reward is infinite from step {step} on, in {len(infinite)} of {logged}"
        return fail(f"{message} logged steps (limit 0)", step, "broken-reward", share=share)
    step = log.steps[lost[0]]
    message = f"no reward of step {step} is finite, as in {len(lost)} of {logged} logged steps"
    if share > MISSING or _longest_streak(lost) >= STREAK_LENGTH:
        limit = f"(limit {MISSING:.0%})"
        return fail(f"{message} {limit}", step, "broken-reward", share=share)
    return warn(f"{message} (limit {MISSING:.0%})", step, share=share)


def _longest_streak(indices: Sequence[int]) -> int:
    longest = count = 0
    last = -2
    for index in indices:
        count = count + 1 if index == last + 1 else 1
        longest, last = max(longest, count), index
    return longest


def equal_rewards(log: ScalarLog) -> ScalarFinding:
    """Look for many steps in a row in which hardly any group has two different rewards."""
    flags = _equal_reward_flags(log)
    streak = first_streak(flags)
    if streak is None:
        present = [flag for flag in flags if flag is not None]
        if not present:
            return no_data("no logged metric shows whether rewards differ")
        return ok(
            f"rewards are all equal in {sum(present)} of {len(present)} logged steps, and "
            f"never in {min(STREAK_LENGTH, len(present))} in a row"
        )
    start, end = streak
    rewards = log.column("reward")
    there = finite_values(rewards[start:end])
    level = sum(there) / len(there) if there else math.nan
    message = (
        f"hardly any group has two different rewards (limit {EQUAL:.0%} equal) from step "
        f"{log.steps[start]} on, for {end - start} logged steps or more; the mean reward is "
        f"{format_number(level)}"
    )
    before = finite_values(rewards[: min(start, STREAK_LENGTH)])
    if before and level - sum(before) / len(before) > LEARNT * max(abs(level), 1e-9):
        return warn(
            f"{message}, and it had risen to that level: the task is solved",
            log.steps[start],
        )
    return fail(
        message,
        log.steps[start],
        *("equal-rewards", "broken-reward", "malformed-output", "context-truncated"),
        *("kl-sign-flipped", "hidden-sampling-transform"),
        *("broken-sampler", "random-weights", "reward-hacking", "step-too-big"),
        *("entropy-term-wrong", "ratio-not-applied", "kl-controller-reversed"),
        *("corrupted-sync", "prompt-mismatch", "stop-token-fault", "malformed-prompt"),
        "temperature-on-one-side",
        reward=level,
    )


def _equal_reward_flags(log: ScalarLog) -> list[bool | None]:
    """Return whether hardly any group differs, by the most exact metric of each step."""
    share = apply_test(log.column("frac_reward_zero_std"), lambda v: v > EQUAL)
    mixed = apply_test(log.column("frac_mixed"), lambda v: v < 1 - EQUAL)
    std = apply_test(log.column("reward_std"), lambda v: v == 0)
    # over the whole batch: equal there means equal in every group
    flat = [gap if gap is None else gap == 0 for gap in _value_range(log, "reward")]
    none = [gap if gap is None else gap == 0 for gap in _value_range(log, "advantage")]
    columns = zip(share, mixed, none, std, flat, strict=True)
    return [next((flag for flag in flags if flag is not None), None) for flags in columns]


def _value_range(log: ScalarLog, name: str) -> list[float | None]:
    """Return maximum minus minimum per step; None where one is missing or non-finite."""
    ends = zip(log.column(f"{name}/min"), log.column(f"{name}/max"), strict=True)
    return [b - a if is_finite(a) and is_finite(b) else None for a, b in ends]


def equal_completions(log: ScalarLog) -> ScalarFinding:
    """Look for groups whose completions are the same text over and over."""
    column = log.column("completions/equal_ratio")
    streak = first_streak(apply_test(column, lambda share: share > SAME))
    if streak is None:
        return ok(f"at most {SAME:.0%} of the completions repeat another of their group for long")
    step = log.steps[streak[0]]
    return fail(
        f"more than {SAME:.0%} of the completions repeat another of their group, from step "
        f"{step} on: the random streams are equal, or the policy is near-deterministic",
        step,
        *("broken-sampler", "hidden-sampling-transform", "reward-hacking"),
    )


def cut_off(log: ScalarLog) -> ScalarFinding:
    """Look for many steps in a row in which almost every completion ran into the length limit."""
    column = log.column("completions/clipped_ratio")
    streak = first_streak(apply_test(column, lambda share: share >= CUT_OFF))
    present = finite_values(column)
    if streak is None:
        return ok(
            f"{min(present):.0%} to {max(present):.0%} of the completions were cut off, and "
            f"never {CUT_OFF:.0%} for long"
        )
    step = log.steps[streak[0]]
    message = f"{CUT_OFF:.0%} or more of the completions are cut off from step {step} on"
    if min(present[:STREAK_LENGTH]) < GREW:
        return warn(
            (
                f"{message}; {min(present[:STREAK_LENGTH]):.0%} were "
                "at the start: completions grew in training"
            ),
            step,
        )
    return fail(
        message,
        step,
        *("context-truncated", "stop-token-fault", "random-weights", "prompt-mismatch"),
        *("reward-hacking", "step-too-big", "corrupted-sync"),
        share=CUT_OFF,
    )


SIGNS = (
    ScalarCheck(
        name="missing-rewards",
        needs=(),
        check_log=missing_rewards,
        decided_by=("record.reward", "record.reward_parts"),
    ),
    ScalarCheck(
        name="equal-rewards",
        needs=("frac_reward_zero_std|frac_mixed|reward_std|reward/max|advantage/max",),
        check_log=equal_rewards,
        decided_by=(
            *("record.reward", "record.group", "record.token_ids", "record.finish_reason"),
            *("record.entropy", "probes.regrade"),
        ),
    ),
    ScalarCheck(
        name="equal-completions",
        needs=("completions/equal_ratio",),
        check_log=equal_completions,
        decided_by=("record.token_ids", "record.entropy", "record.logp_sampler"),
    ),
    ScalarCheck(
        name="cut-off",
        needs=("completions/clipped_ratio",),
        check_log=cut_off,
        decided_by=(
            *("record.token_ids", "record.finish_reason", "run.eos_ids", "record.entropy"),
        ),
    ),
)
