"""kl-not-applied: the KL term does not reach the gradient, or reaches it twice."""

from dataclasses import replace

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import no_kl_term

OFF = 0.03  # of the ratio: rounding of fp32 leaves 1e-6, of bf16 1e-2
ALONG = 0.99  # cosine: twice the same gradient, not another one of twice the norm


def judge(case: Case) -> Finding:
    """Flag a KL term that has no effect, or twice its effect.

    Looks for
        The change that the coefficient makes to the actual gradient, against the expected
        change.
    Why it matters
        The KL is computed and logged at the cost of a reference pass, and the coefficient has
        no effect: a flag that an algorithm ignores, a detached value, a fast path without it.
    Confirmed when
        The change is 0, or twice the expected one, within 3%.
    Ruled out when
        It is neither; or the run has no KL term. A change of 0 excludes loss-scaled-wrong,
        which would leave a fraction of it.
    Confused with
        kl-gradient-wrong (a gradient of another form arrives); kl-sign-flipped (the opposite
        arrives); moved-reference (the term is correct, and the KL is 0).
    """
    answer = case.answers["kl_gradient"]
    ratio, cosine = answer["ratio"], answer["cosine"]
    if ratio is None or cosine is None:
        return no_data("policy and reference agree, so no term has a gradient yet")
    size = float(answer["norm"] or 0) / max(float(answer["expected_norm"] or 0), 1e-300)
    nothing, twice = size < OFF, abs(ratio - 2) < 2 * OFF and cosine > ALONG
    summary = (
        f"the coefficient changes the gradient by {ratio:.3f} times the expected change (limits: "
        f"not 0 and not 2, within {OFF:g})"
    )
    found = (failed if nothing or twice else passed)(summary, ratio=float(ratio), size=size)
    return replace(found, never_by=("loss-scaled-wrong",)) if nothing else found


CHECK = Check(
    name="kl-not-applied",
    stage=Stage.WIRING,
    needs=("probes.kl_gradient",),
    fix="Add the KL term to the loss exactly once, with its graph; reject options that drop it.",
    judge=judge,
    alibi=no_kl_term,
    explains=("kl-gradient-wrong", "step-too-big", "reward-hacking"),
)
