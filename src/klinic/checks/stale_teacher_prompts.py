"""stale-teacher-prompts: the teacher scored the completions after other prompts."""

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)

MAX_MEAN = 0.05  # nats: other kernels and batch shapes leave less, bf16 included


def judge_case(case: Case) -> Finding:
    """Flag log-probs of the teacher that it does not repeat on the step's own prompts.

    Looks for
        The teacher's log-probs as the step used them, against those of the same teacher for the
        prompts and completions that were recorded.
    Why it matters
        Completions after another prompt are unlikely for a good teacher. The KL is then large
        whatever the policy does, and its gradient teaches answers to other questions.
    Confirmed when
        They differ by more than 0.05 nats on average.
    Ruled out when
        The teacher repeats its log-probs.
    Confused with
        swapped-teacher (other weights); wrong-tokenizer (the teacher repeats its log-probs, and
        they are below those of a uniform guess).
    """
    probe = case.probe_results["teacher_rescore"]
    if probe.get("mean") is None or probe.get("largest") is None:
        return no_data_finding("no trained token was scored again")
    mean, largest = float(probe["mean"]), float(probe["largest"])
    summary = (
        f"the teacher's log-probs of this step differ from those it gives for the recorded prompts "
        f"by {mean:.3g} nats on average (limit {MAX_MEAN:g}), at most {largest:.3g}"
    )
    return (failed_finding if mean > MAX_MEAN else passed_finding)(summary, mean=mean)


CHECK = Check(
    name="stale-teacher-prompts",
    description="the teacher scored the completions after other prompts",
    stage=Stage.ALIGNMENT,
    needs=("probes.teacher_rescore",),
    fix="Send the teacher the prompt ids and completion ids of the same rows, from the record of "
    "the step that is trained on.",
    judge=judge_case,
    is_of_setup=True,
    explains=("wrong-tokenizer", "swapped-teacher"),
    reads=("record.logp_teacher", "record.prompt_ids", "run.teacher"),
)
