"""Check of the difference between sampler and learner log-probs, and its first step."""

from klinic.doctor.scalars.check import (
    ScalarCheck,
    ScalarFinding,
    fail,
    finite_values,
    format_number,
    median,
    no_data,
    ok,
    warn,
)
from klinic.evidence.readers.log import ScalarLog
from klinic.evidence.verdict import Verdict

LIMITS = {
    "sampler/gap": (0.1, 0.04, "nats per token"),
    "sampler/kl": (0.1, 0.03, "nats per token"),
    "sampler/prob_gap": (0.1, 0.04, "in probability"),
    "sampler/mult_prob_error": (1.105, 1.041, "times"),
}
"""Fail limit, warn limit, unit. Healthy in bf16: a gap of 0.010 to 0.018 nats, 0.03 with a bf16
head; a sampler that missed one update had 0.2 (TRL #5312). As a KL, 0.01 is advised and up to 0.1
occurred in mixtures of experts (tinker-feedback #22). The mean of exp(gap) is at least exp of the
mean gap, so its limits are exp of those; NeMo-RL calls 1.02 usual and marks samples from 1.05."""
FARTHER_THAN_POLICY = 4.0  # times the KL to the start, in the KL of sampler and learner
FAR_AT_ONCE = 1.0  # nats per token: no policy moves so far in a few updates
FEW_STEPS = 10  # logged
WORST_FIRST = (Verdict.FAIL, Verdict.WARN, Verdict.PASS)
WINDOW = 5  # logged steps
STEADY = 5  # logged steps in which the largest age has stayed the same
MORE_STALE, MIN_MORE_STALE = 2.0, 2.0  # times, and updates more, than while it was steady

FROM_START = (
    *("temperature-on-one-side", "hidden-sampling-transform", "misaligned-logp", "retokenised"),
    *("prompt-mismatch", "layout-changes-logp", "dropout-in-scoring", "imprecise-logp"),
    *("routing-mismatch", "truncation-not-mirrored", "gap-grows-with-position"),
    *("unnormalised-logp", "corrupted-sync", "unexplained-gap"),
)
FROM_LATER_STEP = (
    *("stale-sampler", "samples-too-old", "stale-prefix-cache", "routing-mismatch"),
    *("hidden-sampling-transform", "temperature-on-one-side", "retokenised"),
    "corrupted-sync",
)


def sampler_far_from_learner(log: ScalarLog) -> ScalarFinding:
    """Look for log-probs of the sampler that are not those of the learner."""
    findings = [_check_metric(log, name) for name in LIMITS if log.has_metric(name)]
    return min(findings, key=lambda said: WORST_FIRST.index(said.verdict))


def _check_metric(log: ScalarLog, name: str) -> ScalarFinding:
    limit, warn_limit, unit = LIMITS[name]
    present = [
        (s, v) for s, v in zip(log.steps, log.column(name), strict=True) if finite_values([v])
    ]
    values = [value or 0.0 for _, value in present]
    written = log.written_as[name]
    if max(values) <= warn_limit:
        return ok(f"`{written}` is at most {format_number(max(values))} {unit} (limit {limit:g})")
    size = min(WINDOW, len(values))
    medians = [median(values[end - size : end]) for end in range(size, len(values) + 1)]
    beyond = next((index for index, value in enumerate(medians) if value > limit), None)
    highest = max(medians)
    if beyond is None:
        message = (
            f"`{written}` is at most {format_number(highest)} "
            f"{unit} (median of {size} logged steps, limit "
            f"{limit:g})"
        )
        return (ok if highest <= warn_limit else warn)(message)
    # a sampler that never gets new weights matches in the first step only
    at_start = beyond == 0 and values[0] > limit
    step = next(step for step, value in present[beyond:] if (value or 0.0) > limit)
    since = (
        "from the start" if at_start else f"from step {step} on, {format_number(values[0])} before"
    )
    message = (
        f"`{written}` is {format_number(medians[beyond])} {unit} "
        f"{since} (median of {size} logged steps, limit {limit:g})"
    )
    causes: tuple[str, ...] = FROM_START if at_start else FROM_LATER_STEP
    if not at_start and (farther := _farther_than_policy(log, name)):
        message += f"; {farther}: farther from the learner than any of its older weights"
        causes = ("corrupted-sync", *(cause for cause in causes if cause != "corrupted-sync"))
    return fail(message, step, *causes, gap=medians[beyond])


def _farther_than_policy(log: ScalarLog, name: str) -> str:
    """Return how the sampler is farther from the learner than the learner moved; "" if it is not.

    Old weights are at most as far away as the start, which the KL to the reference measures.
    """
    present = [
        (p, v) for p, v in enumerate(log.column(name)) if v is not None and finite_values([v])
    ]
    # half the square of a mean difference is a lower bound of the KL to second order
    as_kl = {"sampler/gap": lambda v: v * v / 2, "sampler/kl": lambda v: v}.get(name)
    if as_kl is None:
        return ""
    distances = [(p, as_kl(v)) for p, v in present if v > LIMITS[name][0]]
    moved = [max(finite_values(log.column("kl")[: p + 1]), default=None) for p, _ in distances]
    beyond = [
        (kl, most)
        for (_, kl), most in zip(distances, moved, strict=True)
        if most is not None and kl > max(FARTHER_THAN_POLICY * most, LIMITS["sampler/kl"][0])
    ]
    if len(beyond) > len(distances) / 2:
        kl, most = beyond[-1]
        return (
            f"it reaches a KL of {format_number(kl)}, and the policy moved by {format_number(most)}"
        )
    if any(most is not None for most in moved):
        return ""
    at_once = [kl for p, kl in distances if p < FEW_STEPS and kl > as_kl(FAR_AT_ONCE)]
    return f"it reaches a KL of {format_number(at_once[0])} in a few steps" if at_once else ""


def verdicts_of_gap(log: ScalarLog) -> list[Verdict]:
    """Return the verdict on each logged metric of the gap."""
    return [_check_metric(log, name).verdict for name in LIMITS if log.has_metric(name)]


def samples_get_older(log: ScalarLog) -> ScalarFinding:
    """Look for samples that are far older than they were for many steps before."""
    present = [
        (step, value)
        for step, value in zip(log.steps, log.column("staleness/max"), strict=True)
        if value is not None and finite_values([value])
    ]
    num_first = max(len(present) // 3, STEADY)
    if len(present) < num_first + WINDOW:
        return no_data(f"{STEADY + WINDOW} logged steps are needed")
    values = [value for _, value in present]
    plateau = max(values[:num_first])
    reached = values[:num_first].index(plateau)
    limit = max(MORE_STALE * plateau, plateau + MIN_MORE_STALE)
    ends = range(num_first + WINDOW, len(values) + 1)
    beyond = next((e for e in ends if median(values[e - WINDOW : e]) > limit), None)
    written = log.written_as["staleness/max"]
    message = f"`{written}` is at most {plateau:g} updates in the first {num_first} logged steps"
    if beyond is None:
        return ok(f"{message}, and at most {max(values):g} later (limit {limit:g})")
    if num_first - reached < STEADY:  # it was still rising
        return warn(f"{message}, and reaches {max(values):g}", present[beyond - 1][0])
    step = next(step for step, value in present[num_first:] if value > plateau)
    return fail(
        f"{message}, where it stays for {num_first - reached} of them, and reaches "
        f"{max(values):g} later (limit {limit:g})",
        step,
        *("samples-too-old", "state-lost"),
        staleness=max(values),
    )


SIGNS = (
    ScalarCheck(
        name="samples-get-older",
        needs=("staleness/max",),
        check_log=samples_get_older,
        decided_by=("record.weight_version", "facts.learner_version", "run.sampler"),
    ),
    ScalarCheck(
        name="sampler-far-from-learner",
        needs=("|".join(LIMITS),),
        check_log=sampler_far_from_learner,
        decided_by=(
            *("record.logp_sampler", "record.logp_old", "record.entropy", "record.rank"),
            *("record.weight_version", "record.round_trip", "record.prompt_ids_match"),
            *("facts.learner_version", "facts.weights_loaded", "run.sampling"),
        ),
    ),
)
