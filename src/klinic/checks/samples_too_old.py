"""samples-too-old: the learner trains on samples of outdated weights."""

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
from klinic.checks.measures import rms_logp_gap


def judge_case(case: Case) -> Finding:
    """Flag samples that are older than the run allows.

    Looks for
        The number of updates between the weights that sampled a token and the learner's,
        against the lag that the run allows: that at the first update on a generation, and the
        further updates on the same generation, as declared or as counted by the recorder. A run
        that declares no lag allows none.
    Why it matters
        If the learner recomputes the old log-probs, the ratio hides the age of a sample:
        nothing is clipped while sampler and learner drift apart.
    Confirmed when
        A trained token is older than allowed.
    Ruled out when
        All are within the lag.
    Confused with
        stale-sampler (tokens carry the newest version, and were sampled from older weights).
    """
    record, version = case.record, case.learner_version
    assert record.weight_version is not None and version is not None  # noqa: S101, PT018 - needed
    if not record.loss_mask.any():
        return no_data_finding("no token is trained on")
    lag = version - int(record.weight_version[record.loss_mask].min())
    max_lag = int(case.run["sampler"].get("max_version_lag") or 0) + _num_earlier_updates(case)
    gap_text = ""
    if record.logp_sampler is not None and record.logp_old is not None:
        gap_text = f", {rms_logp_gap(record, 'logp_sampler', 'logp_old'):.3g} nats from the learner"
    summary = f"the oldest token is {lag} updates old{gap_text} (limit {max_lag})"
    return (failed_finding if lag > max_lag else passed_finding)(summary, lag=float(np.max(lag)))


def _num_earlier_updates(case: Case) -> int:
    """Return the updates on a generation that may precede this one on the same samples."""
    declared = case.run.get("updates_per_generation")
    if declared is not None:
        return max(int(declared) - 1, 0)
    return int(case.record.facts.get("updates_on_generation") or 0)


CHECK = Check(
    name="samples-too-old",
    description="the learner trains on samples of outdated weights",
    stage=Stage.SAMPLER,
    needs=("record.weight_version", "facts.learner_version", "run.sampler"),
    fix="Bound the lag between sampler and learner, and compute ratios against the sampler's "
    "log-probs. If the lag is intended, declare it: `max_version_lag`, `updates_per_generation`.",
    judge=judge_case,
    explains=(
        "stale-sampler",
        "stale-prefix-cache",
        "step-too-big",
        "kl-tail-dominates",
        "unexplained-gap",
    ),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.logp_sampler",
        "record.logp_old",
        "record.logp",
        "run.loss",
        "run.logp_old",
        "run.updates_per_generation",
        "facts.updates_on_generation",
        "metrics.clip_ratio",
    ),
)
