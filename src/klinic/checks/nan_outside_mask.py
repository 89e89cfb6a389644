"""nan-outside-mask: NaN leaks from masked or empty positions."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, passed
from klinic.evidence.record import StepRecord

TOKENS = ("logp", "logp_old", "logp_ref", "logp_sampler", "entropy")


def judge(case: Case) -> Finding:
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
    numbers = {name: float(value) for name, value in facts.items() if value is not None}
    bad = [name for name, value in numbers.items() if not np.isfinite(value)]
    if not bad:
        return passed("loss and gradient are finite")
    inside = _num_bad(record, record.loss_mask)
    if inside:
        return passed(f"{inside} trained tokens or rewards are not finite: the cause is there")
    outside = _num_bad(record, ~record.loss_mask)
    empty = int(record.facts.get("num_empty_micro_batches") or 0)
    summary = (
        f"{' and '.join(bad)} not finite, and every trained token is; {outside} non-finite values "
        f"at tokens that are not trained on, and {empty} empty micro-batches (limit 0)"
    )
    return failed(summary, outside=float(outside), empty=float(empty))


def _num_bad(record: StepRecord, where: np.ndarray) -> int:
    """Count non-finite values at masked tokens; for the loss mask, rewards and advantages too."""
    columns = [getattr(record, name) for name in TOKENS if getattr(record, name) is not None]
    unreported = record.logp_sampler  # NaN there means that the sampler reported no value
    bad = sum(int((~np.isfinite(c[where])).sum()) for c in columns if c is not unreported)
    if where is record.loss_mask:
        bad += sum(int((~np.isfinite(c)).sum()) for c in _graded(record))
    return bad


def _graded(record: StepRecord) -> list[np.ndarray]:
    """Return the advantages, and the rewards of rows that are trained on."""
    columns = [] if record.advantage is None else [record.advantage]
    if record.reward is not None:
        num_before = np.concatenate(([0], np.cumsum(record.loss_mask)))[record.row_offsets]
        columns.append(record.reward[np.diff(num_before) > 0])
    return columns


CHECK = Check(
    name="nan-outside-mask",
    stage=Stage.ALIGNMENT,
    needs=("facts.loss", "record.logp_old"),
    fix="Mask with `where` before the exponential instead of multiplying after it, and clamp "
    "every denominator to at least 1.",
    judge=judge,
    explains=("policy-does-not-move", "kl-not-applied", "kl-gradient-wrong", "loss-scaled-wrong"),
)
