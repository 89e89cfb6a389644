"""gradient-not-cleared: gradients of earlier batches are still in the buffers of the next one."""

from statistics import median

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.evidence.record import StepRecord

MIN_FRACTION = 1e-3  # of the median gradient norm of steps with advantages
MIN_NORM = 1e-8  # of the gradient, if no such step is known
MIN_STEPS = 2  # with a gradient from nothing: a single one may be an accident of the record


def judge_case(case: Case) -> Finding:
    """Flag a gradient in a step whose loss has none.

    Looks for
        Steps whose groups all have equal rewards: every advantage is 0, the coefficient of the KL
        term is 0, and the loss is exactly 0. And their gradient norm, against that of steps with
        advantages.
    Why it matters
        Without `zero_grad`, or with it before the wrong call, every update repeats the gradients
        of earlier batches. The policy moves on by old rewards, like with a momentum that nobody
        set, and the learning rate is too high by a factor that grows.
    Confirmed when
        At least two such steps have a gradient norm above a thousandth of the usual one.
    Ruled out when
        Such a step has no gradient.
    Confused with
        equal-rewards (too many steps have no advantage); step-too-big (every gradient is that of
        its batch, and the updates are too large).
    """
    if not _has_zero_loss(case.record):
        return no_data_finding("the step has advantages, a KL term or a loss other than 0")
    silent = [record for record in case.recent_records if _has_zero_loss(record)]
    usual = [norm for r in case.recent_records if not _has_zero_loss(r) and (norm := _norm(r))]
    limit = max(MIN_FRACTION * median(usual) if usual else 0.0, MIN_NORM)
    norm = _norm(case.record) or 0.0
    steps = [record.step for record in silent if (_norm(record) or 0.0) > limit]
    summary = (
        f"every advantage is 0, and so is the loss: the gradient norm is {norm:.3g} (limit "
        f"{limit:.3g})"
    )
    if norm <= limit:
        return passed_finding(summary, grad_norm=norm)
    if len(steps) < MIN_STEPS:
        return no_data_finding(f"{summary}, in one step so far ({MIN_STEPS} are needed)")
    return failed_finding(f"{summary}, in {len(steps)} of {len(silent)} such steps", grad_norm=norm)


def _has_zero_loss(record: StepRecord) -> bool:
    """Return whether no term of a step's loss can have a gradient."""
    advantage, facts = record.advantage, record.facts
    return (
        advantage is not None
        and record.logp_teacher is None
        and bool(record.loss_mask.any())
        and not advantage.any()
        and facts.get("kl_coef") == 0
        and facts.get("loss") == 0
        and not facts.get("entropy_coef")
    )


def _norm(record: StepRecord) -> float | None:
    norm = record.facts.get("grad_norm")
    return float(norm) if isinstance(norm, int | float) and 0 <= norm < float("inf") else None


CHECK = Check(
    name="gradient-not-cleared",
    description="gradients of earlier batches are still in the buffers of the next one",
    stage=Stage.WIRING,
    needs=("record.advantage", "facts.loss", "facts.grad_norm", "facts.kl_coef"),
    fix="Call optimizer.zero_grad() once per update: after optimizer.step(), and before the first "
    "backward pass of the next one; on the optimizer that holds the trained weights.",
    judge=judge_case,
    explains=("policy-gradient-wrong", "loss-scaled-wrong", "step-too-big"),
    reads=("record.loss_mask", "record.logp_teacher", "facts.entropy_coef"),
)
