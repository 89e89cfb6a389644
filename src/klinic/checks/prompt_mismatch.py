"""prompt-mismatch: the sampler received another prompt than the learner scores."""

from klinic.checks.base import Case, Check, Finding, Stage, failed, passed
from klinic.checks.measures import rms_gap


def judge(case: Case) -> Finding:
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
    match = case.record.prompt_ids_match
    assert match is not None  # noqa: S101 - needed
    differ = int((~match).sum())
    apart = ""
    if differ and case.record.logp_sampler is not None and case.record.logp_old is not None:
        size = rms_gap(case.record, "logp_sampler", "logp_old")
        apart = f"; sampler and learner are {size:.3g} nats apart"
    summary = f"{differ} of {len(match)} prompts differ from the sampled ones (limit 0){apart}"
    return (failed if differ else passed)(summary, share=differ / max(len(match), 1))


CHECK = Check(
    name="prompt-mismatch",
    stage=Stage.ALIGNMENT,
    needs=("record.prompt_ids_match",),
    fix="Send token ids to the engine, not messages or text, and use a chat template that "
    "preserves earlier turns.",
    judge=judge,
    explains=(
        *("misaligned-logp", "retokenised", "imprecise-logp", "temperature-on-one-side"),
        *("hidden-sampling-transform", "stale-sampler", "stale-prefix-cache", "wrong-reference"),
        *("malformed-output", "context-truncated", "broken-sampler"),
    ),
)
