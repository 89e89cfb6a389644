"""nan-outside-mask: NaN leaks from masked or empty positions."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, passed
from klinic.evidence.record import StepRecord

TOKENS = ("logp", "logp_old", "logp_ref", "logp_sampler", "entropy")


def judge(case: Case) -> Finding:
    """Flag a loss that is not a number although every token it is made of is one.

    Looks for
        A loss or gradient that is not a number, and where the values that are not numbers stand:
        at trained tokens, at others, or nowhere in what was recorded.
    Why it matters
        A mask that multiplies keeps what it should drop, since 0 times infinity is NaN; a mean
        over nothing divides by 0. One such place ends the step for every other.
    Confirmed when
        The loss or the gradient is not a number, and all trained tokens, rewards and advantages
        are.
    Ruled out when
        Loss and gradient are numbers, or a trained token is not one: then look there.
    Confused with
        kl-tail-dominates (a trained token overflows); broken-reward (a reward is not a number);
        broken-sampler (weights or logits are not numbers).
    """
    record = case.record
    facts = {name: record.facts.get(name) for name in ("loss", "grad_norm")}
    numbers = {name: float(value) for name, value in facts.items() if value is not None}
    bad = [name for name, value in numbers.items() if not np.isfinite(value)]
    if not bad:
        return passed("loss and gradient are numbers")
    inside = _num_bad(record, record.loss_mask)
    if inside:
        return passed(f"{inside} trained tokens or rewards are not numbers: it starts there")
    outside = _num_bad(record, ~record.loss_mask)
    empty = int(record.facts.get("num_empty_micro_batches") or 0)
    summary = (
        f"{' and '.join(bad)} not a number, and every trained token is one; {outside} values at "
        f"tokens that are not trained on are none, and {empty} micro-batches are empty (limit 0)"
    )
    return failed(summary, outside=float(outside), empty=float(empty))


def _num_bad(record: StepRecord, where: np.ndarray) -> int:
    """Count what is not a number there, and among rewards and advantages if it is trained on."""
    columns = [getattr(record, name) for name in TOKENS if getattr(record, name) is not None]
    unreported = record.logp_sampler  # NaN there only says that the sampler reported nothing
    bad = sum(int((~np.isfinite(c[where])).sum()) for c in columns if c is not unreported)
    if where is record.loss_mask:
        bad += sum(int((~np.isfinite(c)).sum()) for c in _graded(record))
    return bad


def _graded(record: StepRecord) -> list[np.ndarray]:
    """Advantages, and the rewards of rows that are trained on."""
    columns = [] if record.advantage is None else [record.advantage]
    if record.reward is not None:
        num_before = np.concatenate(([0], np.cumsum(record.loss_mask)))[record.row_offsets]
        columns.append(record.reward[np.diff(num_before) > 0])
    return columns


CHECK = Check(
    name="nan-outside-mask",
    stage=Stage.ALIGNMENT,
    needs=("facts.loss", "record.logp_old"),
    fix="Choose with `where` before the exponential instead of multiplying behind it, and give "
    "every denominator a floor of 1.",
    judge=judge,
    explains=("policy-does-not-move", "kl-not-applied", "kl-gradient-wrong", "loss-scaled-wrong"),
)
