"""wrong-reference: the reference is not the policy the run started from."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import gap, rms_gap

SAME_ENGINE = 1e-4  # nats: one function scores both, so equal weights differ by rounding only
TWO_ENGINES = 0.03  # nats: bf16 against fp32, if the precision of log-probs is unknown
NOISY = 3.0  # times the gap between sampler and learner, an estimate of the precision
ENOUGH = 50  # tokens


def judge(case: Case) -> Finding:
    """Flag a KL above 0 before the first update.

    Looks for
        The gap between policy and reference before the first update, when they should be equal.
    Why it matters
        No weight has changed, so a KL above 0 is measured against another model: usually the
        base under an adapter that was trained before, and the run is pulled back to it from the
        first step.
    Confirmed when
        It is above 0.0001 nats, and above three times the gap between sampler and learner.
    Ruled out when
        Policy and reference agree before the first update, or the recipe sets another
        reference.
    Confused with
        temperature-on-one-side (the gap is a line over logp + entropy); misaligned-logp (a
        shift removes it); dropout-in-scoring (the learner does not even agree with itself).
    """
    if case.version != 0:
        return no_data("policy and reference must agree only before the first update")
    reference = case.run["reference"]
    if reference.get("wanted") == "path":
        return passed(f"the recipe sets another reference: {reference.get('source')}")
    between = gap(case.record, "logp_old", "logp_ref")
    if between.size < ENOUGH:
        return no_data(f"fewer than {ENOUGH} trained tokens have a log-prob of both sides")
    limit = TWO_ENGINES
    if case.record.logp_sampler is not None:
        noise = rms_gap(case.record, "logp_old", "logp_sampler")
        limit = max(SAME_ENGINE, NOISY * noise)
    apart = rms_gap(case.record, "logp_old", "logp_ref")
    summary = (
        f"policy and reference are {apart:.3g} nats apart before the first update (limit "
        f"{limit:.3g}), a KL of {float(np.mean(between)):.3g} nats per token"
    )
    return (failed if apart > limit else passed)(summary, gap=apart, limit=limit)


CHECK = Check(
    name="wrong-reference",
    stage=Stage.REFERENCE,
    needs=("record.logp_old", "record.logp_ref", "facts.learner_version", "run.reference"),
    fix="Use the start of the policy as the reference: a frozen copy including the adapter (leave "
    "`reference` out), or merge the adapter before training.",
    judge=judge,
    explains=("kl-tail-dominates", "step-too-big"),
)
