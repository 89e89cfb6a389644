"""teacher-as-reference: teacher and reference are one model, though the run names two."""

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
from klinic.checks.measures import logp_gap

MIN_TOKENS = 20  # tokens: bit-identical log-probs on all of them are then no coincidence


def judge_case(case: Case) -> Finding:
    """Flag a run in which teacher and reference give the same log-probs.

    Looks for
        The log-probs of teacher and reference on the trained tokens, where run.json names two
        models with different digests.
    Why it matters
        One of the two terms pulls towards the wrong model: the policy is distilled from its own
        start, or tied to the teacher by the penalty that should keep it near its start.
    Confirmed when
        They are equal bit for bit on every trained token.
    Ruled out when
        Any token differs, or the run names the same weights for both.
    Confused with
        wrong-reference (the reference is a third model).
    """
    digests = [case.run[name].get("digest") for name in ("teacher", "reference")]
    if digests[0] == digests[1]:
        return passed_finding("the run names the same weights for both")
    gap = np.abs(logp_gap(case.record, "logp_teacher", "logp_ref"))
    if gap.size < MIN_TOKENS:
        return no_data_finding(f"fewer than {MIN_TOKENS} trained tokens have both log-probs")
    largest = float(gap.max())
    summary = f"teacher and reference differ by at most {largest:.3g} nats (limit: above 0)"
    return (failed_finding if largest == 0 else passed_finding)(summary, largest=largest)


CHECK = Check(
    name="teacher-as-reference",
    description="teacher and reference are one model, though the run names two",
    stage=Stage.REFERENCE,
    needs=("record.logp_teacher", "record.logp_ref", "run.teacher", "run.reference"),
    fix="Score each term with its own model: the reference with the policy's start, the teacher "
    "with teacher.path.",
    judge=judge_case,
    is_of_setup=True,
    explains=("wrong-reference", "moved-reference", "kl-tail-dominates"),
    reads=("record.loss_mask", "record.row_offsets", "facts.teacher_digest"),
)
