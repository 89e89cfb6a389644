"""swapped-teacher: the teacher is not the model that scored the first step."""

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.measures import rms
from klinic.checks.repeated_rows import repeated_difference

MIN_TOKENS = 20  # tokens of rows that come again
MAX_CHANGE = 0.05  # nats, root mean square: bf16 kernels of other shapes leave less


def judge_case(case: Case) -> Finding:
    """Flag a teacher whose weights change during the run.

    Looks for
        The teacher's fingerprint against that of the first step, and its log-probs of completions
        that come again.
    Why it matters
        The policy is drawn to two different models. A server that reloads another checkpoint, a
        folder that is overwritten and a teacher that shares the policy's weights all look like a
        KL that stops falling, or one that falls by itself.
    Confirmed when
        The fingerprint is not that of the first step; or the log-probs of the same completions
        differ from the first ones by 0.05 nats.
    Ruled out when
        The fingerprint is the same, or the same completions get the same log-probs.
    Confused with
        stale-teacher-prompts (the weights are the same, the prompts are not).
    """
    if case.start is None or case.start.step == case.record.step:
        return no_data_finding("a first step and a later one are needed")
    then, now = (r.facts.get("teacher_fingerprint") for r in (case.start, case.record))
    if then is not None and now is not None and then != now:
        return failed_finding(
            f"the teacher was {str(then)[:8]} and is {str(now)[:8]} (limit: the same)"
        )
    change = repeated_difference(case.record, (case.start, *case.earlier), "logp_teacher")
    if change.size >= MIN_TOKENS:
        size = rms(change)
        summary = (
            f"on {change.size} tokens that came before, the teacher's log-probs have changed by "
            f"{size:.3g} nats (limit {MAX_CHANGE:g})"
        )
        return (failed_finding if size > MAX_CHANGE else passed_finding)(summary, change=size)
    if then is None or now is None:
        return no_data_finding("neither a fingerprint of the teacher nor a repeated completion")
    return passed_finding(f"the teacher is {str(now)[:8]}, that of the first step")


CHECK = Check(
    name="swapped-teacher",
    description="the teacher is not the model that scored the first step",
    stage=Stage.REFERENCE,
    needs=("record.logp_teacher",),
    fix="Load the teacher once from a folder that nothing else writes, keep its digest with the "
    "run, and refuse to resume with another.",
    judge=judge_case,
    is_of_setup=True,
    explains=("wrong-tokenizer",),
    reads=(
        "facts.teacher_digest",
        "facts.teacher_fingerprint",
        "record.token_ids",
        "record.prompt_ids",
        "record.prompt_offsets",
        "record.row_offsets",
    ),
)
