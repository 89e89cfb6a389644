"""wrong-metric: the run is healthy and its logged metrics are wrong."""

import math

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
from klinic.checks.measures import (
    column_difference,
    finite_trained_tokens,
    float64_column,
    mean,
    row_means,
)
from klinic.evidence.record import StepRecord
from klinic.maths import kl

MAX_RELATIVE_ERROR = 0.02  # relative: k3 in the other direction is off by more above 0.01 nats
MIN_ABSOLUTE_ERROR = 1e-4  # nats: smaller differences are ignored


def judge_case(case: Case) -> Finding:
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
    if case.record.facts.get("step_rows") is not None:
        return no_data_finding("the record is a sample of the rows; metrics are of all")
    logged = case.metrics.get(case.record.step, {})
    compared = {
        name: (float(logged[name]), values)
        for name, values in _recomputed_metrics(case.record).items()
        if logged.get(name) is not None and math.isfinite(float(logged[name]))
    }
    if not compared:
        return no_data_finding("none of kl, entropy and grad_norm was logged at this step")
    worst = max(compared, key=lambda name: _relative_error(*compared[name]))
    logged_value, values = compared[worst]
    relative_error = _relative_error(logged_value, values)
    summary = (
        f"{worst} was logged as {logged_value:.4g} and is {values[0]:.4g} "
        f"by the record: {relative_error:.1%} off "
        f"(limit {MAX_RELATIVE_ERROR:.0%})"
    )
    return (failed_finding if relative_error > MAX_RELATIVE_ERROR else passed_finding)(
        summary, off=relative_error
    )


def _relative_error(logged_value: float, values: tuple[float, ...]) -> float:
    return min(
        max(abs(logged_value - v) - MIN_ABSOLUTE_ERROR, 0.0) / max(abs(v), 1e-12) for v in values
    )


def _recomputed_metrics(record: StepRecord) -> dict[str, tuple[float, ...]]:
    """Return metrics computed from the record: means over tokens, and over rows."""
    recomputed: dict[str, tuple[float, ...]] = {}
    if record.logp_old is not None and record.logp_ref is not None:
        mask = finite_trained_tokens(record, "logp_old", "logp_ref")
        if mask.any():
            log_ratio = column_difference(record, "logp_old", "logp_ref")
            k3 = kl.k3(logp_p=log_ratio, logp_q=np.zeros_like(log_ratio))
            recomputed["kl"] = _token_and_row_means(record, k3, mask)
    if record.entropy is not None and record.loss_mask.any():
        mask = finite_trained_tokens(record, "entropy")
        recomputed["entropy"] = _token_and_row_means(
            record, float64_column(record, "entropy"), mask
        )
    grad_norm = record.facts.get("grad_norm")
    if grad_norm is not None and np.isfinite(float(grad_norm)):
        recomputed["grad_norm"] = (float(grad_norm),)
    return recomputed


def _token_and_row_means(
    record: StepRecord, values: np.ndarray, mask: np.ndarray
) -> tuple[float, float]:
    means_by_row = row_means(record, values, mask)
    return mean(values[mask]), mean(means_by_row[~np.isnan(means_by_row)])


CHECK = Check(
    name="wrong-metric",
    description="the run is healthy and its logged metrics are wrong",
    stage=Stage.REPORTING,
    needs=("metrics.kl", "record.logp_old", "record.logp_ref"),
    fix="Average over trained tokens only, in the direction KL(policy || reference), and state "
    "whether a norm is from before or after clipping.",
    judge=judge_case,
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.entropy",
        "metrics.entropy",
        "metrics.grad_norm",
        "facts.grad_norm",
        "facts.step_rows",
    ),
)
