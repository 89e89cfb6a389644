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
from klinic.checks.measures import row_logp_gaps

LARGE_ROW_GAP = 0.3  # nats, mean of a row: ten times that of bf16 against fp32
MIN_GAP_RATIO = 5.0  # times the gap of the surviving rows
MIN_ROWS = 2  # rows of each kind


def judge_case(case: Case) -> Finding:
    """Flag gaps on exactly the rows whose ids do not survive decoding and encoding.

    Looks for
        Rows that were sampled as one sequence of ids and would be encoded as another, and the
        gap between sampler and learner on them and on the others.
    Why it matters
        After the first position that differs, every log-prob belongs to another text. Few rows
        are affected, so the mean looks harmless, and multi-turn runs end in NaN.
    Confirmed when
        Such rows have a mean gap above 0.3 nats and five times that of the others.
    Ruled out when
        Every row survives, or the rows that do not have the same gap as the others: then the
        sampled ids are the scored ids.
    Confused with
        misaligned-logp (every row); prompt-mismatch (the ids of the prompt differ).
    """
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
    return (failed_finding if changed_gap > limit else passed_finding)(
        summary, gap=changed_gap, others=surviving_gap
    )


CHECK = Check(
    name="retokenised",
    description="tokens were decoded to text and encoded again",
    stage=Stage.ALIGNMENT,
    needs=("record.round_trip", "record.logp_sampler", "record.logp_old"),
    fix="Pass the sampled ids from the engine to the learner; encode only new text, such as tool "
    "output.",
    judge=judge_case,
    explains=(
        *("misaligned-logp", "imprecise-logp", "temperature-on-one-side", "wrong-loss-mask"),
        *("stop-token-fault", "hidden-sampling-transform", "broken-sampler"),
    ),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.token_ids",
        "record.emitted_by",
    ),
)
