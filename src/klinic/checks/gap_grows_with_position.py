"""gap-grows-with-position: sampler and learner agree at first and drift apart along a row."""

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
from klinic.checks.gap_models import GapModel, compete_on_sampler_gap
from klinic.checks.gap_tokens import collect_gap_tokens
from klinic.checks.measures import OLDER_SAMPLES, has_older_samples, mean

MAX_MEAN_GAP = 0.05  # nats, mean of the last third: bf16 against fp32 is 0.01 to 0.03
MIN_TOKENS = 50  # tokens


def judge_case(case: Case) -> Finding:
    """Flag a gap between sampler and learner that grows with the position in the completion.

    Looks for
        The size of the gap by position, at tokens of similar surprise, since rounding grows with
        surprise.
    Why it matters
        Positions or attention differ between the two: another scaling of rotary embeddings, a
        window that only one side has, a key-value cache of low precision, a long-context kernel
        that is inexact. Short completions look healthy, and long ones get arbitrary ratios.
    Confirmed when
        The gap grows from third to third of the positions, the first third holds less than a
        tenth of its share, the last third has a mean above 0.05 nats, and no other explanation
        of the gap explains more.
    Ruled out when
        The gap is small at late positions, exists at early ones, or has another explanation.
    Confused with
        retokenised (only rows that do not survive decoding and encoding); imprecise-logp (all
        positions); stale-sampler (all positions, and not before the first update).
    """
    if has_older_samples(case.record):
        return no_data_finding(OLDER_SAMPLES)
    tokens = collect_gap_tokens(case.record, "logp_sampler")
    if tokens.gap.size < MIN_TOKENS:
        return no_data_finding(
            f"fewer than {MIN_TOKENS} trained tokens have a log-prob of both sides"
        )
    first, last = np.quantile(tokens.position, (1 / 3, 2 / 3))
    early = np.abs(tokens.gap[tokens.position < first])
    late = np.abs(tokens.gap[tokens.position >= last])
    early_gap, late_gap = (mean(part) if part.size else 0.0 for part in (early, late))
    won = case.measure_once(compete_on_sampler_gap, case.record).is_won_by(GapModel.POSITION)
    return (failed_finding if won and late_gap > MAX_MEAN_GAP else passed_finding)(
        f"sampler and learner differ by {early_gap:.3g} nats in the first third of the positions "
        f"and by {late_gap:.3g} in the last (limit {MAX_MEAN_GAP:g})",
        early=early_gap,
        late=late_gap,
    )


CHECK = Check(
    name="gap-grows-with-position",
    description="sampler and learner agree at first and drift apart along a row",
    stage=Stage.SAMPLER,
    needs=("record.logp_sampler", "record.logp_old"),
    fix="Compare position ids, rotary scaling, window and maximum length of both sides; store the "
    "engine's key-value cache in the model's dtype, and switch off cascade attention (vLLM: "
    "disable_cascade_attn=True).",
    judge=judge_case,
    explains=("imprecise-logp", "stale-sampler", "kl-tail-dominates", "unexplained-gap"),
    reads=("record.loss_mask", "record.row_offsets", "record.token_ids", "run.sampler"),
)
