"""Checks of the KL to the reference: nonzero at step 0, negative, always 0, or useless drift."""

import math
import re

from klinic.doctor.scalars.check import (
    STREAK_LENGTH,
    ScalarCheck,
    ScalarFinding,
    fail,
    finite_values,
    format_number,
    is_finite,
    median,
    no_data,
    ok,
    warn,
)
from klinic.doctor.scalars.sampler import verdicts_of_gap
from klinic.evidence.readers.log import Column, ScalarLog, parse_number
from klinic.evidence.verdict import Verdict

MAX_START_KL = 0.05  # nats per token: bf16 noise alone gives 0.0005
NOISE = 0.01
MIN_K1 = -0.01  # nats per token: k1 on the policy's own samples stays above
MIN_K3 = -1e-3  # k3 is never negative, except for rounding
WINDOW = 10  # logged steps: their median ignores a spike
LAST = 5  # logged steps before a restart
MIN_BEFORE = 5e-4  # nats: that of bf16 noise, which a restart does not change
RESTART_FRACTION = 0.2  # of the KL before it
LOSS_COEF, REWARD_COEF = "actor/kl_coef", "actor/reward_kl_penalty_coeff"  # of verl
MIN_TERM = 1e-4  # nats: smaller values are rounding
SAME_RATIO = 0.02  # relative: a term of its own estimator differs by more
TOOLS = re.compile(r"tool|search|observation|retriev|env(ironment)?[/_]|interaction")
TURNS = re.compile(r"(^|[/_])num_turns")
SINGLE_TURN = 2.0  # messages: a question and an answer
FAR = 0.2  # nats per token, as in `doctor/warning_signs.py`
REPLAY_STEPS = 150  # logged steps before the KL exceeds `FAR` that are replayed

FROM_STEP_0 = (
    *("wrong-reference", "temperature-on-one-side", "dropout-in-scoring", "layout-changes-logp"),
    *("misaligned-logp", "prompt-mismatch", "imprecise-logp", "unnormalised-logp", "wrong-metric"),
)
BEHIND_DRIFT = (
    *("step-too-big", "stale-sampler", "samples-too-old", "temperature-on-one-side"),
    *("misaligned-logp", "wrong-loss-mask", "wrong-reference", "dropout-in-scoring"),
    *("kl-gradient-wrong", "kl-not-applied", "kl-sign-flipped", "loss-scaled-wrong"),
    *("broken-reward", "context-truncated", "malformed-output", "random-weights"),
    *("ratio-not-applied", "corrupted-sync", "unnormalised-logp", "policy-gradient-wrong"),
    *("entropy-term-wrong", "gradient-not-cleared", "kl-controller-reversed"),
)
"""`step-too-big`, and every cause that has it as an effect."""
TOKENS = ("record.logp_old", "record.logp_ref", "record.logp_sampler", "record.loss_mask")


def _kl_column(log: ScalarLog) -> Column:
    return log.column("kl" if log.has_metric("kl") else "kl_k1/mean")


def kl_at_step_0(log: ScalarLog) -> ScalarFinding:
    """Look for a KL before the first update, where policy and reference are still one."""
    if log.steps_are_counted or log.steps[0] > max(log.log_interval, 1):
        return no_data("the log does not begin with the first step of the run")
    first = _kl_column(log)[0]
    if not is_finite(first):
        return no_data("the first logged step has no KL")
    alone = log.steps[0] <= 1
    span = f"step {log.steps[0]}" if alone else f"the mean over steps 1 to {log.steps[0]}"
    message = f"the KL is {format_number(first)} nats per token in {span} (limit {MAX_START_KL:g})"
    if abs(first) <= (NOISE if alone else MAX_START_KL):
        return ok(message, kl=first)
    if not alone:
        # part of it may be learnt: only the first step would show
        return warn(f"{message}: log every step to see that of step 1", log.steps[0], kl=first)
    if abs(first) <= MAX_START_KL:
        return warn(
            f"{message}: above rounding noise, below the fault limit", log.steps[0], kl=first
        )
    return fail(
        f"{message}, before any update. It must be 0 there, unless the reference is another model "
        "on purpose",
        log.steps[0],
        *FROM_STEP_0,
        kl=first,
    )


def negative_kl(log: ScalarLog) -> ScalarFinding:
    """Look for a KL that is clearly below 0."""
    if log.has_metric("kl") and log.trainer.has_k3:
        below = [p for p, v in enumerate(log.column("kl")) if v is not None and v < MIN_K3]
        if below:
            step = log.steps[below[0]]
            lowest = log.column("kl")[below[0]]
            return fail(
                f"the KL is {format_number(lowest or 0.0)} in step "
                f"{step}, and this trainer's estimator is "
                "never negative",
                step,
                "wrong-metric",
            )
    column = _kl_column(log)
    if min(finite_values(column)) >= MIN_K1:
        return ok(f"no KL is below {MIN_K1:g} nats per token")
    for index, value in _rolling_medians(column):
        if value < MIN_K1:
            return fail(
                f"the KL is {format_number(value)} nats per token "
                f"around step {log.steps[index]} (median "
                f"of {WINDOW} logged steps, limit {MIN_K1:g}): "
                "the tokens were not sampled from the "
                "policy that scores them",
                log.steps[index],
                *_causes_of_negative_kl(log),
                kl=value,
            )
    return ok(f"no median of {WINDOW} logged steps is below {MIN_K1:g} nats per token")


def _causes_of_negative_kl(log: ScalarLog) -> tuple[str, ...]:
    """Return the causes, the likeliest first: with tools, text that the policy did not sample."""
    of_mask = ("wrong-loss-mask", "misaligned-logp", "wrong-metric")
    if any(v is Verdict.PASS for v in verdicts_of_gap(log)):  # the tokens are the learner's own
        return of_mask
    of_sampler = ("stale-sampler", "samples-too-old")
    of_settings = ("hidden-sampling-transform", "temperature-on-one-side")
    if _uses_tools(log):
        return (*of_mask[:2], *of_sampler, *of_settings, of_mask[2])
    return (of_sampler[0], *of_mask[:2], of_sampler[1], *of_settings, of_mask[2])


def _uses_tools(log: ScalarLog) -> bool:
    """Return whether the metrics are those of episodes with tools or several turns."""
    values = log.entries[-1] if log.entries else {}
    for name, value in values.items():
        number = parse_number(value)
        if number is None or not number > 0:
            continue
        if TOOLS.search(name) or (TURNS.search(name) and number > SINGLE_TURN):
            return True
    return False


def _rolling_medians(column: Column) -> list[tuple[int, float]]:
    """Return the rolling median of ten values, with the index of the last of them."""
    present = [(index, v) for index, v in enumerate(column) if v is not None and math.isfinite(v)]
    values = [value for _, value in present]
    ends = range(WINDOW, len(present) + 1)
    return [(present[end - 1][0], median(values[end - WINDOW : end])) for end in ends]


def kl_falls_at_restart(log: ScalarLog) -> ScalarFinding:
    """Look for a KL that starts again near 0 where a run continues another one."""
    before = log.before
    if before is None:
        return no_data("the log does not continue that of another folder beside it")
    last, first = finite_values(_kl_column(before))[-LAST:], finite_values(_kl_column(log))[:1]
    if len(last) < LAST or not first or median(last) < MIN_BEFORE:
        return no_data(
            f"{LAST} logged steps with a KL above {MIN_BEFORE:g} are needed before the start"
        )
    level = median(last)
    message = (
        f"the KL is {format_number(first[0])} nats per token in step {log.steps[0]}, where the run "
        f"continues {before.files[0].parent}, and was {format_number(level)} before (limit "
        f"{RESTART_FRACTION:.0%} of it)"
    )
    if first[0] >= RESTART_FRACTION * level:
        return ok(message, kl=first[0])
    if _reward_starts_again(log, before):
        return fail(message, log.steps[0], "state-lost", "moved-reference", kl=first[0])
    message += ", and the reward goes on: the reference is the policy that was loaded"
    return fail(message, log.steps[0], "moved-reference", "state-lost", kl=first[0])


def _reward_starts_again(log: ScalarLog, before: ScalarLog) -> bool:
    """Return whether the first rewards are nearer to those of the start than to the last ones."""
    rewards = finite_values(before.column("reward")), finite_values(log.column("reward"))
    if min(map(len, rewards)) < LAST:
        return False
    start, end, now = rewards[0][:LAST], rewards[0][-LAST:], rewards[1][:LAST]
    return abs(median(now) - median(start)) < abs(median(now) - median(end))


def kl_loss_is_k1(log: ScalarLog) -> ScalarFinding:
    """Look for a KL term of the loss that is the mean log-ratio times a constant."""
    term, k1 = log.column("loss/kl"), log.column("kl_k1/mean")
    pairs = [
        (t, k)
        for t, k in zip(term, k1, strict=True)
        if is_finite(t) and is_finite(k) and abs(k) > MIN_TERM
    ]
    if len(pairs) < LAST:
        return no_data(f"{LAST} logged steps with both are needed")
    ratios = [t / k for t, k in pairs]
    ratio = median(ratios)
    message = f"`{log.written_as['loss/kl']}` is {format_number(ratio)} times "
    message += f"`{log.written_as['kl_k1/mean']}`"
    if not ratio or any(abs(r - ratio) > SAME_RATIO * abs(ratio) for r in ratios):
        return ok(f"{message} in the median, and not in every step: it has another estimator")
    return fail(
        f"{message} in all {len(pairs)} steps: the loss has the mean log-ratio (k1), whose "
        "expected gradient is 0, so the term holds nothing",
        log.steps[0],
        "kl-gradient-wrong",
        ratio=ratio,
    )


def kl_applied_twice(log: ScalarLog) -> ScalarFinding:
    """Look for a KL in the reward and in the loss of the same run."""
    coefs = {
        place: finite_values([parse_number(entry.get(name)) for entry in log.entries])
        for place, name in (("loss", LOSS_COEF), ("reward", REWARD_COEF))
    }
    both = all(any(values) for values in coefs.values())
    if not both:
        return ok("the KL is not both in the reward and in the loss")
    return fail(
        f"the KL is in the loss (`{LOSS_COEF}` {format_number(coefs['loss'][0])}) and in the "
        f"reward (`{REWARD_COEF}` {format_number(coefs['reward'][0])}): it counts twice",
        log.steps[0],
        "kl-not-applied",
    )


def kl_stays_0(log: ScalarLog) -> ScalarFinding:
    """Look for a KL of exactly 0 in every step although there are gradients."""
    kls = finite_values(_kl_column(log))
    norms = [v for v in finite_values(log.column("grad_norm")) if v > 0]
    rates = finite_values(log.column("learning_rate"))
    if len(kls) < STREAK_LENGTH or len(norms) < STREAK_LENGTH or (rates and max(rates) == 0):
        return no_data(f"{STREAK_LENGTH} logged steps with a KL and a gradient are needed")
    if any(kls):
        return ok(f"the KL is up to {format_number(max(kls))} nats per token")
    return fail(
        f"the KL is exactly 0 in all {len(kls)} logged steps, and the gradient is not: the policy "
        "does not move, or the reference moves with it",
        log.steps[0],
        *("policy-does-not-move", "moved-reference", "wrong-metric"),
    )


def drift_without_reward(log: ScalarLog) -> ScalarFinding:
    """Look for a KL far from 0 that buys no reward, or is followed by its fall."""
    column = _kl_column(log)
    present = finite_values(column)
    if len(present) < WINDOW:
        return no_data(f"{WINDOW} logged steps with a KL are needed")
    highest = max(present)
    medians = _rolling_medians(column) if highest > FAR else []
    start = next((index for index, value in medians if value > FAR), None)
    if start is None:
        return ok(
            f"the KL is at most {format_number(highest)} nats per "
            f"token, and no median of {WINDOW} logged "
            f"steps is above {FAR:g}",
            kl=highest,
        )
    return _replay_warning_signs(log, column, max(0, start - REPLAY_STEPS))


def _replay_warning_signs(log: ScalarLog, column: Column, start: int) -> ScalarFinding:
    """Replay the log through the warning signs of a live run."""
    from klinic.doctor.warning_signs import DRIFT, KLLimits, WarningState, watch_step

    signs, rewards = WarningState(), log.column("reward")
    for index in range(start, len(log.steps)):
        kl, reward = column[index], rewards[index]
        metrics = {"kl_k1/mean": math.nan if kl is None else kl}
        metrics["reward"] = math.nan if reward is None else reward
        update = watch_step(signs, metrics, KLLimits())
        signs = update.signs
        for sign in update.new:
            if sign.name == DRIFT:
                sentence = sign.sentence.partition(": the policy")[0]
                return fail(
                    f"{sentence[0].lower()}{sentence[1:]}",
                    log.steps[index],
                    *BEHIND_DRIFT,
                    kl=float(sign.facts["figure"]),
                )
    return ok("the KL is far from 0, and no lasting fall of the reward follows it")


SIGNS = (
    ScalarCheck(
        name="kl-at-step-0",
        needs=("kl|kl_k1/mean",),
        check_log=kl_at_step_0,
        decided_by=(
            *TOKENS,
            *("record.entropy", "run.reference", "probes.rescore", "probes.rescore_alone"),
            "probes.adapters_off",
        ),
    ),
    ScalarCheck(
        name="negative-kl",
        needs=("kl|kl_k1/mean",),
        check_log=negative_kl,
        decided_by=(*TOKENS, "record.emitted_by", "record.weight_version", "run.sampling"),
    ),
    ScalarCheck(
        name="kl-falls-at-restart",
        needs=("kl|kl_k1/mean",),
        check_log=kl_falls_at_restart,
        decided_by=(
            *("record.logp_ref", "record.logp_old", "facts.reference_fingerprint"),
            "run.reference",
        ),
    ),
    ScalarCheck(
        name="kl-applied-twice",
        needs=("kl", "kl_k1/mean"),
        check_log=kl_applied_twice,
        decided_by=("facts.kl_coef", "run.estimator"),
    ),
    ScalarCheck(
        name="kl-loss-is-k1",
        needs=("loss/kl", "kl_k1/mean"),
        check_log=kl_loss_is_k1,
        decided_by=("probes.kl_gradient", "run.estimator"),
    ),
    ScalarCheck(
        name="kl-stays-0",
        needs=("kl|kl_k1/mean", "grad_norm"),
        check_log=kl_stays_0,
        decided_by=(
            *("facts.update_norm", "facts.unchanged_share", "facts.reference_fingerprint"),
            *("record.logp_old", "record.logp_ref"),
        ),
    ),
    ScalarCheck(
        name="drift-without-reward",
        needs=("kl|kl_k1/mean", "reward"),
        check_log=drift_without_reward,
        decided_by=(
            *TOKENS,
            *("record.reward", "record.advantage", "record.emitted_by", "record.entropy"),
            *("facts.kl_coef", "facts.loss", "facts.grad_norm", "probes.kl_gradient"),
        ),
    ),
)
