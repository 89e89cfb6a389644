"""teacher-gradient-wrong: the gradient of the KL to the teacher is not that of its estimator."""

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)

MAX_RATIO_ERROR = 0.03  # of the ratio to 1: rounding of fp32 leaves 1e-6, of bf16 1e-2
MIN_COSINE = 0.999  # cosine


def judge_case(case: Case) -> Finding:
    """Flag a teacher term whose gradient is not the one that its estimator defines.

    Looks for
        The teacher term's part of the actual gradient, against the gradient that its estimator
        defines with a constant teacher, computed independently.
    Why it matters
        A teacher that shares weights with the policy, such as its base under an adapter, or that
        is scored outside `no_grad`, is differentiated as well: the teacher is then moved towards
        the policy, and the KL falls without the policy learning.
    Confirmed when
        The two differ by 3% in norm, or in direction.
    Ruled out when
        They are equal.
    Confused with
        swapped-teacher (the teacher's weights change, the gradient is right).
    """
    probe = case.probe_results["teacher_gradient"]
    ratio, cosine = probe["ratio"], probe["cosine"]
    if ratio is None or cosine is None:
        return no_data_finding("policy and teacher agree, so the term has no gradient yet")
    summary = (
        f"the teacher term's gradient is {ratio:.3f} times that of its estimator (limit 1 +- "
        f"{MAX_RATIO_ERROR:g}), with a cosine of {cosine:.4f} (limit {MIN_COSINE:g})"
    )
    wrong = abs(ratio - 1) > MAX_RATIO_ERROR or cosine < MIN_COSINE
    return (failed_finding if wrong else passed_finding)(
        summary, ratio=float(ratio), cosine=float(cosine)
    )


CHECK = Check(
    name="teacher-gradient-wrong",
    description="the gradient of the KL to the teacher is not that of its estimator",
    stage=Stage.WIRING,
    needs=("probes.teacher_gradient",),
    fix="Score the teacher with a frozen copy of its weights under `no_grad`, and differentiate "
    "only the policy's log-probs.",
    judge=judge_case,
    is_of_setup=True,
    reads=("run.teacher", "facts.teacher_coef", "facts.grad_norm_teacher"),
)
