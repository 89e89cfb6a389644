"""loss-scaled-wrong: the loss depends on how the step is split into micro-batches or ranks."""

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)

MAX_RATIO_ERROR = 0.05  # max deviation of the ratio from 1: bf16 kernels of other shapes leave 1e-2
MIN_COSINE = 0.98  # cosine


def judge_case(case: Case) -> Finding:
    """Flag a gradient that depends on the micro-batch size.

    Looks for
        The gradient of some rows in micro-batches of the recipe's size and of half of it.
    Why it matters
        Divided once too often, the learning rate depends on the accumulation steps; averaged
        per micro-batch, short completions get more weight the smaller it is. Both change a run
        that was only meant to fit into memory.
    Confirmed when
        The norms differ by 5%, or the directions by a cosine below 0.98.
    Ruled out when
        The micro-batch size has no effect.
    Confused with
        layout-changes-logp (log-probs change already); step-too-big (the gradient is correct,
        and the learning rate is not).
    """
    probe = case.probe_results["micro_batches"]
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


CHECK = Check(
    name="loss-scaled-wrong",
    description="the loss depends on how the step is split into micro-batches or ranks",
    stage=Stage.WIRING,
    needs=("probes.micro_batches",),
    fix="Divide once, by the tokens (or rows) of the whole step over all micro-batches and ranks.",
    judge=judge_case,
    explains=("kl-gradient-wrong", "kl-not-applied", "step-too-big"),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "facts.loss_denominator",
        "facts.num_micro_batches",
        "facts.micro_batch_size",
        "facts.grad_norm",
        "run.loss",
    ),
)
