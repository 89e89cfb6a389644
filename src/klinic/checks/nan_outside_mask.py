"""nan-outside-mask: NaN leaks from masked or empty positions."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed_finding, passed_finding
from klinic.evidence.record import StepRecord

TOKEN_COLUMNS = ("logp", "logp_old", "logp_ref", "logp_sampler", "entropy")


def judge_case(case: Case) -> Finding:
    """Flag a non-finite loss although every trained token is finite.

    Looks for
        A non-finite loss or gradient, and the location of the non-finite values: at trained
        tokens, at others, or nowhere in the record.
    Why it matters
        A mask that multiplies keeps the values it should drop, since 0 times infinity is NaN; a
        mean over nothing divides by 0. One such position makes the whole step NaN.
    Confirmed when
        The loss or the gradient is not finite, and all trained tokens, rewards and advantages
        are.
    Ruled out when
        Loss and gradient are finite, or a trained token is not: then the cause is there.
    Confused with
        kl-tail-dominates (a trained token overflows); broken-reward (a reward is not finite);
        broken-sampler (weights or logits are not finite).
    """
    record = case.record
    facts = {name: record.facts.get(name) for name in ("loss", "grad_norm")}
    values = {name: float(value) for name, value in facts.items() if value is not None}
    non_finite = [name for name, value in values.items() if not np.isfinite(value)]
    if not non_finite:
        return passed_finding("loss and gradient are finite")
    num_trained = _num_non_finite(record, record.loss_mask)
    if num_trained:
        return passed_finding(
            f"{num_trained} trained tokens or rewards are not finite: the cause is there"
        )
    num_untrained = _num_non_finite(record, ~record.loss_mask)
    num_empty = int(record.facts.get("num_empty_micro_batches") or 0)
    summary = (
        f"{' and '.join(non_finite)} not finite, and every trained "
        f"token is; {num_untrained} non-finite values "
        f"at tokens that are not trained on, and {num_empty} empty micro-batches (limit 0)"
    )
    return failed_finding(summary, outside=float(num_untrained), empty=float(num_empty))


def _num_non_finite(record: StepRecord, mask: np.ndarray) -> int:
    """Count non-finite values at masked tokens; for the loss mask, rewards and advantages too."""
    columns = [getattr(record, name) for name in TOKEN_COLUMNS if getattr(record, name) is not None]
    unreported = record.logp_sampler  # NaN there means that the sampler reported no value
    num_non_finite = sum(int((~np.isfinite(c[mask])).sum()) for c in columns if c is not unreported)
    if mask is record.loss_mask:
        num_non_finite += sum(int((~np.isfinite(c)).sum()) for c in _row_columns(record))
    return num_non_finite


def _row_columns(record: StepRecord) -> list[np.ndarray]:
    """Return the advantages, and the rewards of rows that are trained on."""
    columns = [] if record.advantage is None else [record.advantage]
    if record.reward is not None:
        num_before = np.concatenate(([0], np.cumsum(record.loss_mask)))[record.row_offsets]
        columns.append(record.reward[np.diff(num_before) > 0])
    return columns


CHECK = Check(
    name="nan-outside-mask",
    description="NaN leaks from masked or empty positions",
    stage=Stage.ALIGNMENT,
    needs=("facts.loss", "record.logp_old"),
    fix="Mask with `where` before the exponential instead of multiplying after it, and clamp "
    "every denominator to at least 1.",
    judge=judge_case,
    explains=("policy-does-not-move", "kl-not-applied", "kl-gradient-wrong", "loss-scaled-wrong"),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.logp_ref",
        "record.logp",
        "facts.loss_denominator",
        "facts.num_empty_micro_batches",
    ),
    not_recorded=(
        "padding: records are flat and have none; a NaN loss over finite tokens points there"
    ),
)
