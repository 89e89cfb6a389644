"""prompt-mismatch: the sampler received another prompt than the learner scores."""

from klinic.checks.base import Case, Check, Finding, Stage, failed_finding, passed_finding
from klinic.checks.measures import rms_logp_gap


def judge_case(case: Case) -> Finding:
    """Flag completions that are scored after another prompt than they were sampled from.

    Looks for
        Rows whose prompt ids in the sampler differ from the prompt ids that are scored.
    Why it matters
        A lost first token, a template applied twice or with other options: the completion is
        conditioned on one prompt and scored after another, so every ratio is wrong.
    Confirmed when
        A single row differs.
    Ruled out when
        The ids are equal in all rows.
    Confused with
        retokenised (prompts agree, completions do not); misaligned-logp (ids agree).
    """
    matches = case.record.prompt_ids_match
    assert matches is not None  # noqa: S101 - needed
    num_differing = int((~matches).sum())
    gap_text = ""
    if num_differing and case.record.logp_sampler is not None and case.record.logp_old is not None:
        size = rms_logp_gap(case.record, "logp_sampler", "logp_old")
        gap_text = f"; sampler and learner are {size:.3g} nats apart"
    summary = (
        f"{num_differing} of {len(matches)} prompts differ "
        f"from the sampled ones (limit 0){gap_text}"
    )
    return (failed_finding if num_differing else passed_finding)(
        summary, share=num_differing / max(len(matches), 1)
    )


CHECK = Check(
    name="prompt-mismatch",
    description="the sampler received another prompt than the learner scores",
    stage=Stage.ALIGNMENT,
    needs=("record.prompt_ids_match",),
    fix="Send token ids to the engine, not messages or text, and use a chat template that "
    "preserves earlier turns.",
    judge=judge_case,
    explains=(
        *("misaligned-logp", "retokenised", "imprecise-logp", "temperature-on-one-side"),
        *("hidden-sampling-transform", "stale-sampler", "stale-prefix-cache", "wrong-reference"),
        *("malformed-output", "context-truncated", "broken-sampler"),
        "unexplained-gap",
        "gap-grows-with-position",
        "corrupted-sync",
    ),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.logp_sampler",
        "record.logp_old",
        "record.prompt_ids",
        "record.prompt_offsets",
    ),
)
