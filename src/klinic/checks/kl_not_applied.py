"""kl-not-applied: the KL term does not reach the gradient, or reaches it twice."""

from dataclasses import replace

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.measures import rule_out_without_kl

MAX_RATIO_ERROR = 0.03  # of the ratio: rounding of fp32 leaves 1e-6, of bf16 1e-2
PARALLEL_COSINE = 0.99  # cosine: twice the same gradient, not another one of twice the norm


def judge_case(case: Case) -> Finding:
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
    probe = case.probe_results["kl_gradient"]
    ratio, cosine = probe["ratio"], probe["cosine"]
    if ratio is None or cosine is None:
        return no_data_finding("policy and reference agree, so no term has a gradient yet")
    norm_ratio = float(probe["norm"] or 0) / max(float(probe["expected_norm"] or 0), 1e-300)
    nothing, twice = (
        norm_ratio < MAX_RATIO_ERROR,
        abs(ratio - 2) < 2 * MAX_RATIO_ERROR and cosine > PARALLEL_COSINE,
    )
    summary = (
        f"the coefficient changes the gradient by {ratio:.3f} times the expected change (limits: "
        f"not 0 and not 2, within {MAX_RATIO_ERROR:g})"
    )
    finding = (failed_finding if nothing or twice else passed_finding)(
        summary, ratio=float(ratio), size=norm_ratio
    )
    return replace(finding, excludes=("loss-scaled-wrong",)) if nothing else finding


CHECK = Check(
    name="kl-not-applied",
    description="the KL term does not reach the gradient, or reaches it twice",
    stage=Stage.WIRING,
    needs=("probes.kl_gradient",),
    fix="Add the KL term to the loss exactly once, with its graph; reject options that drop it.",
    judge=judge_case,
    rule_out=rule_out_without_kl,
    explains=("kl-gradient-wrong", "step-too-big", "reward-hacking"),
    reads=(
        "facts.kl_coef",
        "facts.grad_norm_kl",
        "run.estimator",
    ),
)
