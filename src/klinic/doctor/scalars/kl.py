"""Checks of the KL to the reference: nonzero at step 0, negative, always 0, or useless drift."""

import math

from klinic.doctor.scalars.sign import (
    IN_A_ROW,
    Heard,
    Sign,
    fail,
    finite,
    is_number,
    median,
    no_data,
    shown,
    warn,
    well,
)
from klinic.evidence.readers.log import Column, ScalarLog

AT_START = 0.05  # nats per token: bf16 noise alone gives 0.0005
NOISE = 0.01
BELOW = -0.01  # nats per token: k1 on the policy's own samples stays above
K3_BELOW = -1e-3  # k3 is never negative, except for rounding
WINDOW = 10  # logged steps: their median ignores a spike
FAR = 0.2  # nats per token, as in `doctor/warning_signs.py`
BACK = 150  # logged steps before the KL exceeds `FAR` that are replayed

FROM_STEP_0 = (
    *("wrong-reference", "temperature-on-one-side", "dropout-in-scoring", "layout-changes-logp"),
    *("misaligned-logp", "prompt-mismatch", "imprecise-logp", "wrong-metric"),
)
BEHIND_DRIFT = (
    *("step-too-big", "stale-sampler", "samples-too-old", "temperature-on-one-side"),
    *("misaligned-logp", "wrong-loss-mask", "wrong-reference", "dropout-in-scoring"),
    *("kl-gradient-wrong", "kl-not-applied", "kl-sign-flipped", "loss-scaled-wrong"),
    *("broken-reward", "context-truncated", "malformed-output", "random-weights"),
)
"""`step-too-big`, and every cause that has it as an effect."""
TOKENS = ("record.logp_old", "record.logp_ref", "record.logp_sampler", "record.loss_mask")


def _kl(log: ScalarLog) -> Column:
    return log.column("kl" if log.has("kl") else "kl_k1/mean")


def at_step_0(log: ScalarLog) -> Heard:
    """Look for a KL before the first update, where policy and reference are still one."""
    if log.counted or log.steps[0] > max(log.every, 1):
        return no_data("the log does not begin with the first step of the run")
    first = _kl(log)[0]
    if not is_number(first):
        return no_data("the first logged step has no KL")
    alone = log.steps[0] <= 1
    span = f"step {log.steps[0]}" if alone else f"the mean over steps 1 to {log.steps[0]}"
    said = f"the KL is {shown(first)} nats per token in {span} (limit {AT_START:g})"
    if abs(first) <= (NOISE if alone else AT_START):
        return well(said, kl=first)
    if not alone:
        # part of it may be learnt: only the first step would show
        return warn(f"{said}: log every step to see that of step 1", log.steps[0], kl=first)
    if abs(first) <= AT_START:
        return warn(f"{said}: above rounding noise, below the fault limit", log.steps[0], kl=first)
    return fail(
        f"{said}, before any update. It must be 0 there, unless the reference is another model "
        "on purpose",
        log.steps[0],
        *FROM_STEP_0,
        kl=first,
    )


def negative(log: ScalarLog) -> Heard:
    """Look for a KL that is clearly below 0."""
    if log.has("kl") and log.trainer.name in ("TRL", "klinic"):
        below = [p for p, v in enumerate(log.column("kl")) if v is not None and v < K3_BELOW]
        if below:
            step = log.steps[below[0]]
            lowest = log.column("kl")[below[0]]
            return fail(
                f"the KL is {shown(lowest or 0.0)} in step {step}, and this trainer's estimator is "
                "never negative",
                step,
                "wrong-metric",
            )
    column = _kl(log)
    if min(finite(column)) >= BELOW:
        return well(f"no KL is below {BELOW:g} nats per token")
    for place, value in _medians(column):
        if value < BELOW:
            return fail(
                f"the KL is {shown(value)} nats per token around step {log.steps[place]} (median "
                f"of {WINDOW} logged steps, limit {BELOW:g}): the tokens were not sampled from the "
                "policy that scores them",
                log.steps[place],
                *("stale-sampler", "wrong-loss-mask", "misaligned-logp", "samples-too-old"),
                *("hidden-sampling-transform", "temperature-on-one-side", "wrong-metric"),
                kl=value,
            )
    return well(f"no median of {WINDOW} logged steps is below {BELOW:g} nats per token")


def _medians(column: Column) -> list[tuple[int, float]]:
    """Return the rolling median of ten values, with the index of the last of them."""
    known = [(place, v) for place, v in enumerate(column) if v is not None and math.isfinite(v)]
    values = [value for _, value in known]
    ends = range(WINDOW, len(known) + 1)
    return [(known[end - 1][0], median(values[end - WINDOW : end])) for end in ends]


def stays_0(log: ScalarLog) -> Heard:
    """Look for a KL of exactly 0 in every step although there are gradients."""
    kls = finite(_kl(log))
    norms = [v for v in finite(log.column("grad_norm")) if v > 0]
    rates = finite(log.column("learning_rate"))
    if len(kls) < IN_A_ROW or len(norms) < IN_A_ROW or (rates and max(rates) == 0):
        return no_data(f"{IN_A_ROW} logged steps with a KL and a gradient are needed")
    if any(kls):
        return well(f"the KL is up to {shown(max(kls))} nats per token")
    return fail(
        f"the KL is exactly 0 in all {len(kls)} logged steps, and the gradient is not: the policy "
        "does not move, or the reference moves with it",
        log.steps[0],
        *("policy-does-not-move", "moved-reference", "wrong-metric"),
    )


def drift(log: ScalarLog) -> Heard:
    """Look for a KL far from 0 that buys no reward, or is followed by its fall."""
    column = _kl(log)
    known = finite(column)
    if len(known) < WINDOW:
        return no_data(f"{WINDOW} logged steps with a KL are needed")
    highest = max(known)
    medians = _medians(column) if highest > FAR else []
    start = next((place for place, value in medians if value > FAR), None)
    if start is None:
        return well(
            f"the KL is at most {shown(highest)} nats per token, and no median of {WINDOW} logged "
            f"steps is above {FAR:g}",
            kl=highest,
        )
    return _watched(log, column, max(0, start - BACK))


def _watched(log: ScalarLog, column: Column, start: int) -> Heard:
    """Replay the log through the warning signs of a live run."""
    from klinic.doctor.warning_signs import DRIFT, Limits, Signs, watch_step

    signs, rewards = Signs(), log.column("reward")
    for place in range(start, len(log.steps)):
        kl, reward = column[place], rewards[place]
        metrics = {"kl_k1/mean": math.nan if kl is None else kl}
        metrics["reward"] = math.nan if reward is None else reward
        watched = watch_step(signs, metrics, Limits())
        signs = watched.signs
        for sign in watched.new:
            if sign.name == DRIFT:
                said = sign.sentence.partition(": the policy")[0]
                return fail(
                    f"{said[0].lower()}{said[1:]}",
                    log.steps[place],
                    *BEHIND_DRIFT,
                    kl=float(sign.facts["figure"]),
                )
    return well("the KL is far from 0, and the reward rises or stays with it: the policy learns")


SIGNS = (
    Sign(
        name="kl-at-step-0",
        needs=("kl|kl_k1/mean",),
        look=at_step_0,
        decided_by=(
            *TOKENS,
            *("record.entropy", "run.reference", "probes.rescore", "probes.rescore_alone"),
            "probes.adapters_off",
        ),
    ),
    Sign(
        name="negative-kl",
        needs=("kl|kl_k1/mean",),
        look=negative,
        decided_by=(*TOKENS, "record.emitted_by", "record.weight_version", "run.sampling"),
    ),
    Sign(
        name="kl-stays-0",
        needs=("kl|kl_k1/mean", "grad_norm"),
        look=stays_0,
        decided_by=(
            *("facts.update_norm", "facts.unchanged_share", "facts.reference_fingerprint"),
            *("record.logp_old", "record.logp_ref"),
        ),
    ),
    Sign(
        name="drift-without-reward",
        needs=("kl|kl_k1/mean", "reward"),
        look=drift,
        decided_by=(
            *TOKENS,
            *("record.reward", "record.advantage", "record.emitted_by", "record.entropy"),
            *("facts.kl_coef", "probes.kl_gradient"),
        ),
    ),
)
