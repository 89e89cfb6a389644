"""loss-scaled-wrong: the loss depends on how the step is split into micro-batches or ranks."""

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed

OFF = 0.05  # max deviation of the ratio from 1: bf16 kernels of other shapes leave 1e-2
TURNED = 0.98  # cosine


def judge(case: Case) -> Finding:
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
    answer = case.answers["micro_batches"]
    ratio, cosine = answer["ratio"], answer["cosine"]
    if ratio is None or cosine is None:
        return no_data("the gradient is 0, so the micro-batch size cannot affect it")
    wrong = abs(ratio - 1) > OFF or cosine < TURNED
    summary = (
        f"in micro-batches of half the size the gradient is {ratio:.3f} times as large (limit 1 "
        f"+- {OFF:g}), with a cosine of {cosine:.4f} (limit {TURNED:g})"
    )
    return (failed if wrong else passed)(summary, ratio=float(ratio), cosine=float(cosine))


CHECK = Check(
    name="loss-scaled-wrong",
    stage=Stage.WIRING,
    needs=("probes.micro_batches",),
    fix="Divide once, by the tokens (or rows) of the whole step over all micro-batches and ranks.",
    judge=judge,
    explains=("kl-gradient-wrong", "kl-not-applied", "step-too-big"),
)
