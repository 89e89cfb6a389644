"""retokenised: tokens were decoded to text and encoded again."""

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
from klinic.checks.folded_ids import find_folded_ids
from klinic.checks.gap_models import GapModel, compete_on_sampler_gap
from klinic.checks.measures import row_logp_gaps

LARGE_ROW_GAP = 0.3  # nats, mean of a row: ten times that of bf16 against fp32
MIN_GAP_RATIO = 5.0  # times the gap of the surviving rows
MIN_ROWS = 2  # rows of each kind
MAX_REENCODED_FRACTION = 0.01  # of the rows: trained ids are the sampled ones, or they are not


def judge_case(case: Case) -> Finding:
    """Flag gaps on exactly the rows whose ids do not survive decoding and encoding.

    Looks for
        Rows whose trained ids differ from the sampled ones in the middle. Rows that were sampled
        as one sequence of ids and would be encoded as another, and the gap between sampler and
        learner on them and on the others. Rows that agree up to an id that surprises the
        learner, and not after it.
    Why it matters
        After the first position that differs, every log-prob belongs to another text. Few rows
        are affected, so the mean looks harmless, and multi-turn runs end in NaN.
    Confirmed when
        1% of the rows have other ids than were sampled; or rows that would be encoded otherwise
        have a mean gap above 0.3 nats and five times that of the others, and no other
        explanation of the gap explains more; or the gap of each of eight rows begins at one of
        few ids that no row of its prompt without a gap has, the learner gives these two nats less
        than the sampler, and differs by 0.3 nats after them.
    Ruled out when
        All rows have the sampled ids; every row survives; or the rows that do not have the same
        gap as the others: then the sampled ids are the scored ids.
    Confused with
        misaligned-logp (every row); prompt-mismatch (the ids of the prompt differ).
    """
    if (decided := judge_ids(case) or confirm_folded_ids(case)) is not None:
        return decided
    record = case.record
    means = row_logp_gaps(record, "logp_sampler", "logp_old")
    assert record.round_trip is not None  # noqa: S101 - needed
    changed = means[~record.round_trip & np.isfinite(means)]
    surviving = means[record.round_trip & np.isfinite(means)]
    if not changed.size:
        return passed_finding(f"all of {record.num_rows} rows survive decoding and encoding")
    if changed.size < MIN_ROWS or surviving.size < MIN_ROWS:
        return no_data_finding(
            f"{changed.size} rows do not survive, {surviving.size} do: {MIN_ROWS} of each needed"
        )
    changed_gap, surviving_gap = float(changed.mean()), float(surviving.mean())
    limit = max(LARGE_ROW_GAP, MIN_GAP_RATIO * surviving_gap)
    summary = (
        f"{changed.size} of {record.num_rows} rows do not survive decoding and encoding; their gap "
        f"is {changed_gap:.3g} nats (limit {limit:.3g}), that of the others {surviving_gap:.3g}"
    )
    is_lost = case.measure_once(compete_on_sampler_gap, record).is_lost_by(GapModel.RETOKENISED)
    return (failed_finding if changed_gap > limit and not is_lost else passed_finding)(
        summary, gap=changed_gap, others=surviving_gap
    )


def judge_ids(case: Case) -> Finding | None:
    """Return a finding if the trained ids were compared with the sampled ones, and decide."""
    facts, num_rows = case.record.facts, case.record.num_rows
    num_reencoded = facts.get("num_reencoded_rows")
    if num_reencoded is None:
        return None
    if facts.get("num_changed_rows") == 0:
        return passed_finding(f"all of {num_rows} rows have the ids that were sampled")
    if int(num_reencoded) < max(MAX_REENCODED_FRACTION * num_rows, 1):
        return None
    return failed_finding(
        f"{num_reencoded} of {num_rows} rows have other ids than were sampled, in the middle of "
        f"the row (limit {MAX_REENCODED_FRACTION:.0%})",
        reencoded=float(num_reencoded),
    )


def confirm_folded_ids(case: Case) -> Finding | None:
    """Confirm the cause from log-probs alone: ids that were encoded again before they were kept."""
    found = case.measure_once(find_folded_ids, case.record)
    if found is None:
        return None
    return failed_finding(
        f"the gap of {found.rows} rows begins at an id that none of the {found.surviving} rows "
        f"without a gap has for the same prompt; the learner gives it {found.surprise:.3g} nats "
        "less than the sampler: it is not the id that was sampled",
        rows=float(found.rows),
    )


CHECK = Check(
    name="retokenised",
    description="tokens were decoded to text and encoded again",
    stage=Stage.ALIGNMENT,
    needs=("record.round_trip", "record.logp_sampler", "record.logp_old"),
    fix="Pass the sampled ids from the engine to the learner; encode only new text, such as tool "
    "output.",
    judge=judge_case,
    rule_out=judge_ids,
    confirm=confirm_folded_ids,
    explains=(
        *("misaligned-logp", "imprecise-logp", "temperature-on-one-side", "wrong-loss-mask"),
        *("stop-token-fault", "hidden-sampling-transform", "broken-sampler"),
        "unexplained-gap",
        "gap-grows-with-position",
    ),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.token_ids",
        "record.group",
        "record.emitted_by",
        "facts.num_changed_rows",
        "facts.num_reencoded_rows",
    ),
)
