"""wrong-reference: the reference is not the policy the run started from."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import gap, rms_gap

SAME_ENGINE = 1e-4  # nats: one function scores both, so equal weights differ by rounding alone
TWO_ENGINES = 0.03  # nats: bf16 against fp32, where nothing else says how exact log-probs are
NOISY = 3.0  # times the gap between sampler and learner, which shows how exact log-probs are
ENOUGH = 50  # tokens


def judge(case: Case) -> Finding:
    """Flag a KL that is there before anything was learnt.

    Looks for
        The gap between policy and reference before the first update, when they should be one.
    Why it matters
        No weight has changed, so a KL above 0 is to another model: usually the base under an
        adapter that was trained before, and the run is pulled back to it from the first step.
    Confirmed when
        It is above 0.0001 nats, and above three times the gap between sampler and learner.
    Ruled out when
        Policy and reference agree before the first update, or the recipe names a reference of
        its own.
    Confused with
        temperature-on-one-side (the gap is a line over logp + entropy); misaligned-logp (a shift
        removes it); dropout-in-scoring (the learner does not even agree with itself).
    """
    if case.version != 0:
        return no_data("only before the first update policy and reference must agree")
    reference = case.run["reference"]
    if reference.get("wanted") == "path":
        return passed(f"the recipe names a reference of its own: {reference.get('source')}")
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
    fix="Take as the reference what the policy starts from: a frozen copy, of the adapter as well "
    "(leave `reference` out), or merge the adapter before training.",
    judge=judge,
    explains=("kl-tail-dominates", "step-too-big"),
)
