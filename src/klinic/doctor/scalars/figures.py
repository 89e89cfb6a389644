"""Checks of loss and gradient: non-finite values, exploding gradients, zero gradients."""

import math

from klinic.doctor.scalars.sign import (
    Heard,
    Sign,
    fail,
    finite,
    flags_of,
    is_number,
    median,
    no_data,
    shown,
    stretch,
    warn,
    well,
)
from klinic.evidence.readers.log import Column, ScalarLog

WATCHED = ("loss", "kl", "entropy", "grad_norm")
STEADY = 10  # logged steps that must have a metric before its absence counts
LASTING = 3  # logged steps: an fp16 loss scaler skips single steps
BEFORE = 100  # preceding gradient norms whose median is the baseline
FEWEST = 20
SPIKE, FLOOD = 100.0, 20.0  # times the median: of one step, and of the median of five
FLOOD_STEPS = 5
FROM = 1.0  # norms below a usual clip threshold never count as exploding
MOVED = 1e-3  # nats per token: the policy has moved


def not_a_number(log: ScalarLog) -> Heard:
    """Look for a loss, KL, entropy or gradient that is not a number, or is left out for that."""
    first: dict[str, int] = {}
    for name in WATCHED:
        place = _first_lost(log, name)
        if place is not None:
            first[name] = place
    if not first:
        logged = [name for name in WATCHED if log.has(name)]
        return well(f"{', '.join(logged)}: finite in all {len(log.steps)} logged steps")
    place = min(first.values())
    names = [name for name in WATCHED if first.get(name) == place]
    if names == ["grad_norm"] and not _lasts(log.column("grad_norm"), place):
        return warn(
            f"the gradient norm is non-finite in step {log.steps[place]} and finite soon after, "
            "as with an fp16 loss scaler",
            log.steps[place],
        )
    told = [f"`{log.written_as[name]}` {_how(log.column(name)[place])}" for name in names]
    # an infinite KL comes from an exponential; a NaN may have any cause
    infinite = any(value is not None and math.isinf(value) for value in _at(log, names, place))
    causes = ("nan-outside-mask", "kl-tail-dominates", "broken-reward", "broken-sampler")
    if infinite:
        causes = ("kl-tail-dominates", "step-too-big", "misaligned-logp", "nan-outside-mask")
    return fail(f"{' and '.join(told)} in step {log.steps[place]}", log.steps[place], *causes)


def _first_lost(log: ScalarLog, name: str) -> int | None:
    """Return the index of the first non-finite value; a metric never finite counts as unlogged."""
    column = log.column(name)
    if not log.has(name) and name != "grad_norm":
        return None
    for place, value in enumerate(column):
        if value is not None and not math.isfinite(value):
            return place
        if value is None and log.trainer.drops_nan and _gone(log, column, place):
            return place
    return None


def _gone(log: ScalarLog, column: Column, place: int) -> bool:
    """Whether a metric that was always logged is missing from an entry with other metrics."""
    before = column[:place]
    others = [log.column(other)[place] for other in WATCHED]
    always = place >= STEADY and all(value is not None for value in before)
    return always and any(is_number(value) for value in others)


def _lasts(column: Column, place: int) -> bool:
    after = column[place : place + LASTING]
    return not any(is_number(value) for value in after)


def _at(log: ScalarLog, names: list[str], place: int) -> list[float | None]:
    return [log.column(name)[place] for name in names]


def _how(value: float | None) -> str:
    if value is None:
        return "is missing, as this trainer omits NaN,"
    return "is infinite" if math.isinf(value) else "is NaN"


def gradient_explodes(log: ScalarLog) -> Heard:
    """Look for a gradient norm far above that of the steps before it which stays there."""
    places = [p for p, v in enumerate(log.column("grad_norm")) if is_number(v) and v != 0]
    values = [log.column("grad_norm")[place] for place in places]
    norms = finite(values)
    if len(norms) < FEWEST + 1:
        return no_data(f"{len(norms)} nonzero gradient norms, and {FEWEST + 1} are needed")
    spike = None
    highest = 0.0
    for at in range(FEWEST, len(norms)):
        if norms[at] <= FROM or norms[at] <= highest:
            continue
        usual = median(norms[max(0, at - BEFORE) : at])
        ahead = norms[at : at + FLOOD_STEPS]
        step, times = log.steps[places[at]], norms[at] / usual
        if len(ahead) == FLOOD_STEPS and median(ahead) > FLOOD * usual:
            return fail(
                f"the gradient norm is {shown(norms[at])} in step {step}, {times:.0f} times the "
                f"median before, and the median of {FLOOD_STEPS} from there on is "
                f"{median(ahead) / usual:.0f} times it (limit {FLOOD:g})",
                step,
                *("step-too-big", "advantage-explodes", "kl-tail-dominates", "loss-scaled-wrong"),
                *("misaligned-logp", "stale-sampler", "samples-too-old"),
                grad_norm=norms[at],
                usual=usual,
            )
        if times > SPIKE:
            spike, highest = (step, times, norms[at]), norms[at]
    if spike is not None:
        return warn(
            f"the gradient norm is {shown(spike[2])} in step {spike[0]}, {spike[1]:.0f} times the "
            "median before, and falls back: a single batch",
            spike[0],
        )
    return well(f"the gradient norm is never {SPIKE:g} times the median before", limit=SPIKE)


def no_gradient(log: ScalarLog) -> Heard:
    """Look for gradients of exactly 0 in steps whose completions got different rewards."""
    differ = _rewards_differ(log)
    norms = log.column("grad_norm")
    nothing = [
        None if norm is None or math.isnan(norm) or not known else norm == 0
        for norm, known in zip(norms, differ, strict=True)
    ]
    if not any(flag is not None for flag in nothing):
        return no_data("no step has both a gradient norm and rewards that differ")
    found = stretch(nothing)
    if found is None:
        return well("where rewards differ, the gradient is not 0 for long")
    start, end = found
    step = log.steps[start]
    said = f"the gradient norm is exactly 0 from step {step} on, while rewards differ"
    moved = [abs(value) for value in finite(log.column("kl")[start:])]
    if moved and max(moved) - min(moved) > MOVED:
        return fail(f"{said}, but the KL changes: the logged norm is wrong", step, "wrong-metric")
    said = f"{said} ({end - start} logged steps or more)"
    if not moved:  # some engines log 0 without computing a norm, and no KL shows movement
        return fail(said, step, "policy-does-not-move", "wrong-metric")
    return fail(f"{said}, and the KL does not change", step, "policy-does-not-move")


def _rewards_differ(log: ScalarLog) -> list[bool]:
    """Whether a group of each step had different rewards and a completion was trained on."""
    equal = flags_of(log.column("frac_reward_zero_std"), lambda share: share < 1)
    spread = flags_of(log.column("reward_std"), lambda std: std > 0)
    # if no completion ended, trainers may mask all of them
    ended = flags_of(log.column("completions/clipped_ratio"), lambda share: share < 1)
    return [
        bool(s if e is None else e) and d is not False
        for e, s, d in zip(equal, spread, ended, strict=True)
    ]


SIGNS = (
    Sign(
        name="not-a-number",
        needs=("loss|kl|entropy|grad_norm",),
        look=not_a_number,
        decided_by=(
            *("record.logp_old", "record.logp_ref", "record.logp_sampler", "record.reward"),
            "facts.loss",
        ),
    ),
    Sign(
        name="gradient-explodes",
        needs=("grad_norm",),
        look=gradient_explodes,
        decided_by=(
            *("record.advantage", "record.reward", "record.logp_old", "record.logp_ref"),
            *("record.logp_sampler", "probes.micro_batches"),
        ),
    ),
    Sign(
        name="no-gradient",
        needs=("grad_norm", "reward_std|frac_reward_zero_std"),
        look=no_gradient,
        decided_by=("facts.grad_norm", "facts.update_norm", "facts.unchanged_share"),
    ),
)
