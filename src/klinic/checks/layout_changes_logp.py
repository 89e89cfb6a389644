"""layout-changes-logp: padding, packing or a fused kernel changes the log-probs."""

from klinic.checks.base import Case, Check, Finding, Stage, failed_finding, passed_finding

MAX_DIFFERENCE_FP32 = 1e-3  # nats: fp32 kernels of two shapes differ by 1e-5
MAX_DIFFERENCE_BF16 = 0.5  # nats on the worst token: bf16 kernels of two shapes differ by up to 0.1


def judge_case(case: Case) -> Finding:
    """Flag rows whose log-probs depend on the other rows of their batch.

    Looks for
        The difference between rows scored within their batch and the same rows scored alone,
        without padding and without neighbours.
    Why it matters
        Positions counted from the padding, a row that attends to the one packed before it, or a
        kernel that is wrong for some shapes: ratios are off from the first step, for some rows
        only.
    Confirmed when
        A token differs by more than 0.001 nats in fp32, or 0.5 in bf16.
    Ruled out when
        Rows score the same alone.
    Confused with
        dropout-in-scoring (scoring twice differs already); imprecise-logp (rows alone agree
        with the batch, and not with the sampler).
    """
    largest = float(case.probe_results["rescore_alone"]["largest"])
    limit = (
        MAX_DIFFERENCE_FP32 if case.run["policy"].get("dtype") == "fp32" else MAX_DIFFERENCE_BF16
    )
    summary = f"scored alone, a token differs by {largest:.3g} nats (limit {limit:g})"
    return (failed_finding if largest > limit else passed_finding)(summary, largest=largest)


CHECK = Check(
    name="layout-changes-logp",
    description="padding, packing or a fused kernel changes the log-probs",
    stage=Stage.ALIGNMENT,
    needs=("probes.rescore_alone", "run.policy"),
    fix="Pass position ids explicitly, mask attention between rows, and compare some rows with the "
    "same rows scored alone before every long run.",
    judge=judge_case,
    explains=(
        *("imprecise-logp", "temperature-on-one-side", "misaligned-logp", "stale-sampler"),
        *("hidden-sampling-transform", "wrong-reference", "loss-scaled-wrong"),
        *("kl-gradient-wrong", "stale-prefix-cache", "kl-tail-dominates"),
    ),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.logp_sampler",
        "record.logp_old",
        "record.logp",
        "record.prompt_offsets",
        "run.logp_old",
    ),
)
