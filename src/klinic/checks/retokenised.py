"""retokenised: tokens were decoded to text and encoded again."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import row_gaps

LARGE = 0.3  # nats, mean of a row: ten times that of bf16 against fp32
TIMES = 5.0  # times the gap of the surviving rows
ENOUGH = 2  # rows of each kind


def judge(case: Case) -> Finding:
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
    means = row_gaps(record, "logp_sampler", "logp_old")
    assert record.round_trip is not None  # noqa: S101 - needed
    lost = means[~record.round_trip & np.isfinite(means)]
    kept = means[record.round_trip & np.isfinite(means)]
    if not lost.size:
        return passed(f"all of {record.num_rows} rows survive decoding and encoding")
    if lost.size < ENOUGH or kept.size < ENOUGH:
        return no_data(f"{lost.size} rows do not survive, {kept.size} do: {ENOUGH} of each needed")
    bad, good = float(lost.mean()), float(kept.mean())
    limit = max(LARGE, TIMES * good)
    summary = (
        f"{lost.size} of {record.num_rows} rows do not survive decoding and encoding; their gap "
        f"is {bad:.3g} nats (limit {limit:.3g}), that of the others {good:.3g}"
    )
    return (failed if bad > limit else passed)(summary, gap=bad, others=good)


CHECK = Check(
    name="retokenised",
    stage=Stage.ALIGNMENT,
    needs=("record.round_trip", "record.logp_sampler", "record.logp_old"),
    fix="Pass the sampled ids from the engine to the learner; encode only new text, such as tool "
    "output.",
    judge=judge,
    explains=(
        *("misaligned-logp", "imprecise-logp", "temperature-on-one-side", "wrong-loss-mask"),
        *("stop-token-fault", "hidden-sampling-transform", "broken-sampler"),
    ),
)
