"""samples-too-old: the learner trains on samples of weights long past."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import rms_gap


def judge(case: Case) -> Finding:
    """Flag samples that are older than the run allows.

    Looks for
        How many updates the learner has seen since the weights that drew a token, against the lag
        that the run allows.
    Why it matters
        Where old log-probs are computed again by the learner, the ratio hides the age of a
        sample: nothing is ever clipped while sampler and learner drift apart.
    Confirmed when
        A trained token is older than allowed.
    Ruled out when
        All are within the lag.
    Confused with
        stale-sampler (tokens say that they are new, and are not).
    """
    record, version = case.record, case.version
    assert record.weight_version is not None and version is not None  # noqa: S101, PT018 - needed
    if not record.loss_mask.any():
        return no_data("no token is trained on")
    lag = version - int(record.weight_version[record.loss_mask].min())
    allowed = int(case.run["sampler"].get("max_version_lag") or 0)
    apart = ""
    if record.logp_sampler is not None and record.logp_old is not None:
        apart = f", {rms_gap(record, 'logp_sampler', 'logp_old'):.3g} nats from the learner"
    summary = f"the oldest token is {lag} updates old{apart} (limit {allowed})"
    return (failed if lag > allowed else passed)(summary, lag=float(np.max(lag)))


CHECK = Check(
    name="samples-too-old",
    stage=Stage.SAMPLER,
    needs=("record.weight_version", "facts.learner_version", "run.sampler"),
    fix="Bound the lag between sampler and learner, and take ratios to the log-probs that the "
    "sampler reported.",
    judge=judge,
    explains=("stale-sampler", "stale-prefix-cache", "step-too-big", "kl-tail-dominates"),
)
