"""prompt-mismatch: the sampler received another prompt than the learner scores."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed_finding, passed_finding
from klinic.checks.gap_models import GapModel, compete_on_sampler_gap
from klinic.checks.measures import (
    column_difference,
    finite_trained_tokens,
    rms,
    rms_logp_gap,
    row_numbers,
)
from klinic.evidence.record import StepRecord

MIN_GAP = 0.03  # nats, root mean square: that of bf16 against fp32
MAX_GAP_OF_EQUAL_IDS = 1e-3  # nats, root mean square: fp32 engines differ by 1e-5
MIN_TOKENS = 20  # tokens of rows whose prompts differ
MIN_START_GAP = 0.2  # min fraction of the gap that the first step has: templates do not change


def judge_case(case: Case) -> Finding:
    """Flag completions that are scored after another prompt than they were sampled from.

    Looks for
        Rows whose prompt ids in the sampler differ from the prompt ids that are scored. And a gap
        between sampler and learner that begins with the first reply of an environment: earlier
        turns that a template shortens, such as by their reasoning, are read by the sampler in
        another form than is scored.
    Why it matters
        A lost first token, a template applied twice or with other options: the completion is
        conditioned on one prompt and scored after another, so every ratio is wrong.
    Confirmed when
        A single row differs; or the gap is above 0.03 nats, first turns have less than a tenth of
        its square, the first step has it too, and no other explanation of it explains more.
    Ruled out when
        The ids are equal in all rows, and no gap begins with the later turns; or sampler and
        learner agree within 0.001 nats where prompts differ: only the place where the completion
        begins is another one.
    Confused with
        retokenised (prompts agree, completions do not); misaligned-logp (ids agree);
        wrong-loss-mask (tokens of the prompt count as the policy's);
        stale-prefix-cache (later turns are served from a cache of old weights).
    """
    if (finding := judge_later_turns(case)) is not None:
        return finding
    matches = case.record.prompt_ids_match
    assert matches is not None  # noqa: S101 - needed
    num_differing = int((~matches).sum())
    size = _gap_of_rows(case.record, ~matches)
    gap_text = "" if size is None else f"; sampler and learner are {size:.3g} nats apart there"
    summary = (
        f"{num_differing} of {len(matches)} prompts differ "
        f"from the sampled ones (limit 0){gap_text}"
    )
    if size is not None and size < MAX_GAP_OF_EQUAL_IDS:
        return passed_finding(f"{summary}: the same tokens, divided at another place")
    return (failed_finding if num_differing else passed_finding)(
        summary, share=num_differing / max(len(matches), 1)
    )


def _gap_of_rows(record: StepRecord, rows: np.ndarray) -> float | None:
    """Return the root mean square of the sampler gap on some rows; None with too few tokens.

    The old log-probs may be the sampler's own: then those of the current policy tell.
    """
    columns = [name for name in ("logp_old", "logp") if getattr(record, name) is not None]
    if record.logp_sampler is None or not columns:
        return None
    tokens = finite_trained_tokens(record, "logp_sampler", *columns) & rows[row_numbers(record)]
    if np.count_nonzero(tokens) < MIN_TOKENS:
        return None
    return max(rms(column_difference(record, "logp_sampler", name)[tokens]) for name in columns)


def judge_later_turns(case: Case) -> Finding | None:
    """Return a finding if sampler and learner agree up to the first reply and not after it."""
    record = case.record
    if record.logp_sampler is None or record.logp_old is None:
        return None
    competition = case.measure_once(compete_on_sampler_gap, record)
    if competition.size <= MIN_GAP or not competition.is_won_by(GapModel.TURNS):
        return None
    if not _is_there_at_start(case, competition.size):
        return None
    return failed_finding(
        f"sampler and learner are {competition.size:.3g} nats apart (limit {MIN_GAP:g}), and "
        f"tokens after the first reply hold {competition.explained_by(GapModel.TURNS):.0%} of it: "
        "later turns were sampled after other tokens than are scored",
        gap=competition.size,
    )


def _is_there_at_start(case: Case, size: float) -> bool:
    """Return whether the first step has the gap too: a cache of old weights needs an update."""
    start = case.start
    if case.learner_version == 0 or start is None or start.logp_sampler is None:
        return True
    return rms_logp_gap(start, "logp_sampler", "logp_old") >= MIN_START_GAP * size


CHECK = Check(
    name="prompt-mismatch",
    description="the sampler received another prompt than the learner scores",
    stage=Stage.ALIGNMENT,
    needs=("record.prompt_ids_match",),
    fix="Send token ids to the engine, not messages or text, and use a chat template that "
    "preserves earlier turns.",
    judge=judge_case,
    confirm=judge_later_turns,
    explains=(
        *("misaligned-logp", "retokenised", "imprecise-logp", "temperature-on-one-side"),
        *("hidden-sampling-transform", "stale-sampler", "stale-prefix-cache", "wrong-reference"),
        *("malformed-output", "context-truncated", "broken-sampler", "equal-rewards"),
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
        "record.emitted_by",
    ),
)
