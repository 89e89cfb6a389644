"""Check of the difference between sampler and learner log-probs, and its first step."""

from klinic.doctor.scalars.check import (
    ScalarCheck,
    ScalarFinding,
    fail,
    finite_values,
    format_number,
    median,
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
WORST_FIRST = (Verdict.FAIL, Verdict.WARN, Verdict.PASS)
WINDOW = 5  # logged steps

FROM_START = (
    *("temperature-on-one-side", "hidden-sampling-transform", "misaligned-logp", "retokenised"),
    *("prompt-mismatch", "layout-changes-logp", "dropout-in-scoring", "imprecise-logp"),
    *("routing-mismatch", "truncation-not-mirrored", "gap-grows-with-position"),
    *("unnormalised-logp", "corrupted-sync", "unexplained-gap"),
)
FROM_LATER_STEP = (
    *("stale-sampler", "samples-too-old", "stale-prefix-cache", "routing-mismatch"),
    *("hidden-sampling-transform", "temperature-on-one-side", "retokenised"),
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
    return fail(
        f"`{written}` is {format_number(medians[beyond])} {unit} "
        f"{since} (median of {size} logged steps, "
        f"limit {limit:g})",
        step,
        *(FROM_START if at_start else FROM_LATER_STEP),
        gap=medians[beyond],
    )


SIGNS = (
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
