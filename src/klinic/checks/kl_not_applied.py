"""kl-not-applied: the KL term does not reach the gradient, or reaches it twice."""

from dataclasses import replace

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import no_kl_term

OFF = 0.03  # of the ratio: rounding of fp32 leaves 1e-6, of bf16 1e-2
ALONG = 0.99  # cosine: twice the same, and not something else of twice the size


def judge(case: Case) -> Finding:
    """Flag a KL term that has no effect, or twice its effect.

    Looks for
        The difference that the coefficient makes to the real gradient, against what it should be.
    Why it matters
        The KL is computed, logged and paid for with a pass of the reference, and the coefficient
        does nothing: a flag that an algorithm ignores, a detached value, a fast path without it.
    Confirmed when
        The difference is 0, or twice what it should be, within 3%.
    Ruled out when
        It is something else; or no KL term was asked for. Where nothing arrives, no wrong scale has
        made it: that would leave some.
    Confused with
        kl-gradient-wrong (something arrives, of another form); kl-sign-flipped (the opposite
        arrives); moved-reference (the term is right, and the KL is 0).
    """
    answer = case.answers["kl_gradient"]
    ratio, cosine = answer["ratio"], answer["cosine"]
    if ratio is None or cosine is None:
        return no_data("policy and reference agree, so no term has a gradient yet")
    size = float(answer["norm"] or 0) / max(float(answer["expected_norm"] or 0), 1e-300)
    nothing, twice = size < OFF, abs(ratio - 2) < 2 * OFF and cosine > ALONG
    summary = (
        f"the coefficient changes the gradient by {ratio:.3f} times what it should (limits: not 0 "
        f"and not 2, within {OFF:g})"
    )
    found = (failed if nothing or twice else passed)(summary, ratio=float(ratio), size=size)
    return replace(found, never_by=("loss-scaled-wrong",)) if nothing else found


CHECK = Check(
    name="kl-not-applied",
    stage=Stage.WIRING,
    needs=("probes.kl_gradient",),
    fix="Let the KL term be part of the loss exactly once, with its graph, and fail on options "
    "that would drop it.",
    judge=judge,
    alibi=no_kl_term,
    explains=("kl-gradient-wrong", "step-too-big", "reward-hacking"),
)
