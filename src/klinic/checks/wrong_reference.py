"""wrong-reference: the reference is not the policy the run started from."""

import numpy as np

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.measures import logp_gap, rms_logp_gap

MIN_GAP_SAME_ENGINE = (
    1e-4  # nats: one function scores both, so equal weights differ by rounding only
)
MIN_GAP_TWO_ENGINES = 0.03  # nats: bf16 against fp32, if the precision of log-probs is unknown
MIN_NOISE_RATIO = 3.0  # times the gap between sampler and learner, an estimate of the precision
MIN_TOKENS = 50  # tokens


def judge_case(case: Case) -> Finding:
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
    if case.learner_version != 0:
        return no_data_finding("policy and reference must agree only before the first update")
    reference = case.run["reference"]
    if reference.get("wanted") == "path":
        return passed_finding(f"the recipe sets another reference: {reference.get('source')}")
    token_gap = logp_gap(case.record, "logp_old", "logp_ref")
    if token_gap.size < MIN_TOKENS:
        return no_data_finding(
            f"fewer than {MIN_TOKENS} trained tokens have a log-prob of both sides"
        )
    limit = MIN_GAP_TWO_ENGINES
    if case.record.logp_sampler is not None:
        noise = rms_logp_gap(case.record, "logp_old", "logp_sampler")
        limit = max(MIN_GAP_SAME_ENGINE, MIN_NOISE_RATIO * noise)
    reference_gap = rms_logp_gap(case.record, "logp_old", "logp_ref")
    summary = (
        f"policy and reference are {reference_gap:.3g} nats apart before the first update (limit "
        f"{limit:.3g}), a KL of {float(np.mean(token_gap)):.3g} nats per token"
    )
    return (failed_finding if reference_gap > limit else passed_finding)(
        summary, gap=reference_gap, limit=limit
    )


CHECK = Check(
    name="wrong-reference",
    description="the reference is not the policy the run started from",
    stage=Stage.REFERENCE,
    needs=("record.logp_old", "record.logp_ref", "facts.learner_version", "run.reference"),
    fix="Use the start of the policy as the reference: a frozen copy including the adapter (leave "
    "`reference` out), or merge the adapter before training.",
    judge=judge_case,
    explains=("kl-tail-dominates", "step-too-big"),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "facts.reference_digest",
        "run.policy",
        "probes.adapters_off",
    ),
)
