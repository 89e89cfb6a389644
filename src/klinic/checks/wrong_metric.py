"""wrong-metric: the run is healthy and its logged metrics are wrong."""

import math

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import column, difference, known_tokens, mean, row_means
from klinic.evidence.record import StepRecord
from klinic.maths import kl

OFF = 0.02  # relative: k3 in the other direction is off by more above 0.01 nats
SMALL = 1e-4  # nats: smaller differences are ignored


def judge(case: Case) -> Finding:
    """Flag logged metrics that the record does not confirm.

    Looks for
        KL, entropy and gradient norm as logged, against the values computed from the record.
    Why it matters
        An average over padding, the other direction, a norm from before clipping: coefficients
        are raised and runs stopped because of a curve that is an artefact.
    Confirmed when
        One of them is off by more than 2%, whether averaged over tokens or over rows.
    Ruled out when
        They equal the values of the record.
    Confused with
        every cause that changes the run: there record and curve agree.
    """
    told = case.metrics.get(case.record.step, {})
    compared = {
        name: (float(told[name]), values)
        for name, values in _computed(case.record).items()
        if told.get(name) is not None and math.isfinite(float(told[name]))
    }
    if not compared:
        return no_data("none of kl, entropy and grad_norm was logged at this step")
    worst = max(compared, key=lambda name: _off(*compared[name]))
    said, values = compared[worst]
    off = _off(said, values)
    summary = (
        f"{worst} was logged as {said:.4g} and is {values[0]:.4g} by the record: {off:.1%} off "
        f"(limit {OFF:.0%})"
    )
    return (failed if off > OFF else passed)(summary, off=off)


def _off(said: float, values: tuple[float, ...]) -> float:
    return min(max(abs(said - v) - SMALL, 0.0) / max(abs(v), 1e-12) for v in values)


def _computed(record: StepRecord) -> dict[str, tuple[float, ...]]:
    """Return metrics computed from the record: means over tokens, and over rows."""
    found: dict[str, tuple[float, ...]] = {}
    if record.logp_old is not None and record.logp_ref is not None:
        known = known_tokens(record, "logp_old", "logp_ref")
        if known.any():
            everywhere = difference(record, "logp_old", "logp_ref")
            k3 = kl.k3(logp_p=everywhere, logp_q=np.zeros_like(everywhere))
            found["kl"] = _means(record, k3, known)
    if record.entropy is not None and record.loss_mask.any():
        known = known_tokens(record, "entropy")
        found["entropy"] = _means(record, column(record, "entropy"), known)
    grad_norm = record.facts.get("grad_norm")
    if grad_norm is not None and np.isfinite(float(grad_norm)):
        found["grad_norm"] = (float(grad_norm),)
    return found


def _means(record: StepRecord, values: np.ndarray, known: np.ndarray) -> tuple[float, float]:
    of_rows = row_means(record, values, known)
    return mean(values[known]), mean(of_rows[~np.isnan(of_rows)])


CHECK = Check(
    name="wrong-metric",
    stage=Stage.REPORTING,
    needs=("metrics.kl", "record.logp_old", "record.logp_ref"),
    fix="Average over trained tokens only, in the direction KL(policy || reference), and state "
    "whether a norm is from before or after clipping.",
    judge=judge,
)
