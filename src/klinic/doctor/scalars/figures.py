"""Checks of loss and gradient: non-finite values, exploding gradients, zero gradients."""

import math

from klinic.doctor.scalars.check import (
    ScalarCheck,
    ScalarFinding,
    apply_test,
    fail,
    finite_values,
    first_streak,
    format_number,
    is_finite,
    median,
    no_data,
    ok,
    warn,
)
from klinic.evidence.readers.log import Column, ScalarLog

WATCHED = ("loss", "kl", "entropy", "grad_norm")
STEADY = 10  # logged steps that must have a metric before its absence counts
LASTING = 3  # logged steps: an fp16 loss scaler skips single steps
BASELINE_STEPS = 100  # preceding gradient norms whose median is the baseline
MIN_NORMS = 20
SPIKE, SUSTAINED = 100.0, 20.0  # times the median: of one step, and of the median of five
SUSTAINED_STEPS = 5
MIN_NORM = 1.0  # norms below a usual clip threshold never count as exploding
MIN_KL_CHANGE = 1e-3  # nats per token: the policy has moved


def non_finite(log: ScalarLog) -> ScalarFinding:
    """Look for a loss, KL, entropy or gradient that is not a number, or is left out for that."""
    first: dict[str, int] = {}
    for name in WATCHED:
        index = _first_non_finite(log, name)
        if index is not None:
            first[name] = index
    if not first:
        logged = [name for name in WATCHED if log.has_metric(name)]
        return ok(f"{', '.join(logged)}: finite in all {len(log.steps)} logged steps")
    index = min(first.values())
    names = [name for name in WATCHED if first.get(name) == index]
    if names == ["grad_norm"] and not _is_lasting(log.column("grad_norm"), index):
        return warn(
            f"the gradient norm is non-finite in step {log.steps[index]} and finite soon after, "
            "as with an fp16 loss scaler",
            log.steps[index],
        )
    descriptions = [
        f"`{log.written_as[name]}` {_describe_value(log.column(name)[index])}" for name in names
    ]
    # an infinite KL comes from an exponential; a NaN may have any cause
    infinite = any(
        value is not None and math.isinf(value) for value in _values_at(log, names, index)
    )
    causes = ("nan-outside-mask", "kl-tail-dominates", "broken-reward", "broken-sampler")
    if infinite:
        causes = ("kl-tail-dominates", "step-too-big", "misaligned-logp", "nan-outside-mask")
    return fail(
        f"{' and '.join(descriptions)} in step {log.steps[index]}", log.steps[index], *causes
    )


def _first_non_finite(log: ScalarLog, name: str) -> int | None:
    """Return the index of the first non-finite value; a metric never finite counts as unlogged."""
    column = log.column(name)
    if not log.has_metric(name) and name != "grad_norm":
        return None
    for index, value in enumerate(column):
        if value is not None and not math.isfinite(value):
            return index
        if value is None and log.trainer.drops_nan and _is_dropped(log, column, index):
            return index
    return None


def _is_dropped(log: ScalarLog, column: Column, index: int) -> bool:
    """Whether a metric that was always logged is missing from an entry with other metrics."""
    before = column[:index]
    other_values = [log.column(other)[index] for other in WATCHED]
    always = index >= STEADY and all(value is not None for value in before)
    return always and any(is_finite(value) for value in other_values)


def _is_lasting(column: Column, index: int) -> bool:
    after = column[index : index + LASTING]
    return not any(is_finite(value) for value in after)


def _values_at(log: ScalarLog, names: list[str], index: int) -> list[float | None]:
    return [log.column(name)[index] for name in names]


def _describe_value(value: float | None) -> str:
    if value is None:
        return "is missing, as this trainer omits NaN,"
    return "is infinite" if math.isinf(value) else "is NaN"


def gradient_explodes(log: ScalarLog) -> ScalarFinding:
    """Look for a gradient norm far above that of the steps before it which stays there."""
    indices = [p for p, v in enumerate(log.column("grad_norm")) if is_finite(v) and v != 0]
    values = [log.column("grad_norm")[index] for index in indices]
    norms = finite_values(values)
    if len(norms) < MIN_NORMS + 1:
        return no_data(f"{len(norms)} nonzero gradient norms, and {MIN_NORMS + 1} are needed")
    spike = None
    highest = 0.0
    for at in range(MIN_NORMS, len(norms)):
        if norms[at] <= MIN_NORM or norms[at] <= highest:
            continue
        usual = median(norms[max(0, at - BASELINE_STEPS) : at])
        following = norms[at : at + SUSTAINED_STEPS]
        step, times = log.steps[indices[at]], norms[at] / usual
        if len(following) == SUSTAINED_STEPS and median(following) > SUSTAINED * usual:
            return fail(
                f"the gradient norm is {format_number(norms[at])} "
                f"in step {step}, {times:.0f} times the "
                f"median before, and the median of {SUSTAINED_STEPS} from there on is "
                f"{median(following) / usual:.0f} times it (limit {SUSTAINED:g})",
                step,
                *("step-too-big", "advantage-explodes", "kl-tail-dominates", "loss-scaled-wrong"),
                *("misaligned-logp", "stale-sampler", "samples-too-old", "gradient-not-cleared"),
                grad_norm=norms[at],
                usual=usual,
            )
        if times > SPIKE:
            spike, highest = (step, times, norms[at]), norms[at]
    if spike is not None:
        return warn(
            f"the gradient norm is {format_number(spike[2])} in "
            f"step {spike[0]}, {spike[1]:.0f} times the "
            "median before, and falls back: a single batch",
            spike[0],
        )
    return ok(f"the gradient norm is never {SPIKE:g} times the median before", limit=SPIKE)


def no_gradient(log: ScalarLog) -> ScalarFinding:
    """Look for gradients of exactly 0 in steps whose completions got different rewards."""
    differ = _rewards_differ(log)
    norms = log.column("grad_norm")
    is_zero = [
        None if norm is None or math.isnan(norm) or not differs else norm == 0
        for norm, differs in zip(norms, differ, strict=True)
    ]
    if not any(flag is not None for flag in is_zero):
        return no_data("no step has both a gradient norm and rewards that differ")
    streak = first_streak(is_zero)
    if streak is None:
        return ok("where rewards differ, the gradient is not 0 for long")
    start, end = streak
    step = log.steps[start]
    message = f"the gradient norm is exactly 0 from step {step} on, while rewards differ"
    moved = [abs(value) for value in finite_values(log.column("kl")[start:])]
    if moved and max(moved) - min(moved) > MIN_KL_CHANGE:
        return fail(
            f"{message}, but the KL changes: the logged norm is wrong", step, "wrong-metric"
        )
    message = f"{message} ({end - start} logged steps or more)"
    if not moved:  # some engines log 0 without computing a norm, and no KL shows movement
        return fail(message, step, "policy-does-not-move", "wrong-metric")
    return fail(f"{message}, and the KL does not change", step, "policy-does-not-move")


def _rewards_differ(log: ScalarLog) -> list[bool]:
    """Whether a group of each step had different rewards and a completion was trained on."""
    equal = apply_test(log.column("frac_reward_zero_std"), lambda share: share < 1)
    spread = apply_test(log.column("reward_std"), lambda std: std > 0)
    # if no completion ended, trainers may mask all of them
    ended = apply_test(log.column("completions/clipped_ratio"), lambda share: share < 1)
    return [
        bool(s if e is None else e) and d is not False
        for e, s, d in zip(equal, spread, ended, strict=True)
    ]


SIGNS = (
    ScalarCheck(
        name="not-a-number",
        needs=("loss|kl|entropy|grad_norm",),
        check_log=non_finite,
        decided_by=(
            *("record.logp_old", "record.logp_ref", "record.logp_sampler", "record.reward"),
            "facts.loss",
        ),
    ),
    ScalarCheck(
        name="gradient-explodes",
        needs=("grad_norm",),
        check_log=gradient_explodes,
        decided_by=(
            *("record.advantage", "record.reward", "record.logp_old", "record.logp_ref"),
            *("record.logp_sampler", "probes.micro_batches"),
        ),
    ),
    ScalarCheck(
        name="no-gradient",
        needs=("grad_norm", "reward_std|frac_reward_zero_std"),
        check_log=no_gradient,
        decided_by=("facts.grad_norm", "facts.update_norm", "facts.unchanged_share"),
    ),
)
