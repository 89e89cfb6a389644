"""loss-scaled-wrong: the loss depends on how the step is split into micro-batches or ranks."""

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
from klinic.evidence.record import StepRecord

MAX_RATIO_ERROR = 0.05  # max deviation of the ratio from 1: bf16 kernels of other shapes leave 1e-2
MIN_COSINE = 0.98  # cosine
MAX_DENOMINATOR_ERROR = 0.02  # relative: counts are exact


def judge_case(case: Case) -> Finding:
    """Flag a gradient that depends on the micro-batch size.

    Looks for
        The gradient of some rows in micro-batches of the recipe's size and of half of it. And
        the divisor of the summed loss: that of each process, and of a mean over tokens against
        the trained tokens of the step.
    Why it matters
        Divided once too often, the learning rate depends on the accumulation steps; averaged
        per micro-batch, short completions get more weight the smaller it is. Both change a run
        that was only meant to fit into memory.
    Confirmed when
        The norms differ by 5%, or the directions by a cosine below 0.98; or processes divide by
        different numbers; or a mean over tokens divides by 2% more or fewer than are trained.
    Ruled out when
        The micro-batch size has no effect.
    Confused with
        layout-changes-logp (log-probs change already); step-too-big (the gradient is correct,
        and the learning rate is not).
    """
    if fault := _denominator_fault(case):
        return failed_finding(fault)
    probe = case.probe_results.get("micro_batches")
    if probe is None:
        return no_data_finding("not recorded: `probes.micro_batches`")
    ratio, cosine = probe["ratio"], probe["cosine"]
    if ratio is None or cosine is None:
        return no_data_finding("the gradient is 0, so the micro-batch size cannot affect it")
    wrong = abs(ratio - 1) > MAX_RATIO_ERROR or cosine < MIN_COSINE
    summary = (
        f"in micro-batches of half the size the gradient is {ratio:.3f} times as large (limit 1 "
        f"+- {MAX_RATIO_ERROR:g}), with a cosine of {cosine:.4f} (limit {MIN_COSINE:g})"
    )
    return (failed_finding if wrong else passed_finding)(
        summary, ratio=float(ratio), cosine=float(cosine)
    )


def _denominator_fault(case: Case) -> str:
    """Return what is wrong with the divisors of the loss; empty if nothing, or if none is known."""
    record = case.record
    num_tokens = int(record.loss_mask.sum())
    divisors = _divisors_by_row(record)
    if divisors is None or not num_tokens:
        return ""
    if record.process is not None:
        low, high = (float(pick(divisors)) for pick in (np.min, np.max))
        by_process = {float(p): divisors[record.process == p] for p in np.unique(record.process)}
        is_of_process = all(np.ptp(part) == 0 for part in by_process.values())
        if is_of_process and high > (1 + MAX_DENOMINATOR_ERROR) * low:
            return (
                f"the loss of one process is divided by {low:g}, that of another by {high:g} "
                "(limit: the same): a token counts by the process that trains it"
            )
    is_token_mean = (case.run.get("loss") or {}).get("aggregation") == "token_mean"
    divisor = float(divisors.mean())
    if is_token_mean and abs(divisor / num_tokens - 1) > MAX_DENOMINATOR_ERROR:
        return (
            f"the mean over tokens divides by {divisor:g}, and {num_tokens} tokens are trained on "
            f"(limit +- {MAX_DENOMINATOR_ERROR:.0%}): masked or padded ones are counted, or the "
            "mean is taken twice"
        )
    return ""


def _divisors_by_row(record: StepRecord) -> np.ndarray | None:
    if record.loss_denominator is not None:
        divisors = np.asarray(record.loss_denominator, np.float64)
    elif isinstance(total := record.facts.get("loss_denominator"), int | float):
        divisors = np.full(record.num_rows, float(total))
    else:
        return None
    return divisors if divisors.size and (divisors > 0).all() else None


CHECK = Check(
    name="loss-scaled-wrong",
    description="the loss depends on how the step is split into micro-batches or ranks",
    stage=Stage.WIRING,
    needs=(),
    optional_needs=("probes.micro_batches",),
    fix="Divide once, by the tokens (or rows) of the whole step over all micro-batches and ranks.",
    judge=judge_case,
    explains=("kl-gradient-wrong", "kl-not-applied", "step-too-big"),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.process",
        "record.loss_denominator",
        "facts.loss_denominator",
        "facts.num_micro_batches",
        "facts.micro_batch_size",
        "facts.grad_norm",
        "run.loss",
    ),
)
