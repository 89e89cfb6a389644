"""layout-changes-logp: padding, packing or a fused kernel changes the log-probs."""

from klinic.checks.base import (
    Case,
    Check,
    Finding,
    Stage,
    failed_finding,
    no_data_finding,
    passed_finding,
)
from klinic.checks.gap_models import GapModel, compete_on_sampler_gap

MAX_DIFFERENCE_FP32 = 1e-3  # nats: fp32 kernels of two shapes differ by 1e-5
MIN_GAP = 0.1  # nats, root mean square: three times that of bf16 against fp32
MAX_DIFFERENCE_BF16 = 0.5  # nats on the worst token: bf16 kernels of two shapes differ by up to 0.1


def judge_case(case: Case) -> Finding:
    """Flag rows whose log-probs depend on the other rows of their batch.

    Looks for
        The difference between rows scored within their batch and the same rows scored alone,
        without padding and without neighbours. And a gap between sampler and learner on the rows
        with a shorter prompt than the longest, which a batch pads, and on no others.
    Why it matters
        Positions counted from the padding, a row that attends to the one packed before it, or a
        kernel that is wrong for some shapes: ratios are off from the first step, for some rows
        only.
    Confirmed when
        A token differs by more than 0.001 nats in fp32, or 0.5 in bf16; or the gap is above 0.1
        nats, rows with the longest prompt have less than a tenth of its square, and no other
        explanation of the gap explains more.
    Ruled out when
        Rows score the same alone.
    Confused with
        dropout-in-scoring (scoring twice differs already); imprecise-logp (rows alone agree
        with the batch, and not with the sampler).
    """
    if (finding := _judge_padding(case)) is not None:
        return finding
    if "rescore_alone" not in case.probe_results:
        return no_data_finding("not recorded: `probes.rescore_alone`")
    largest = float(case.probe_results["rescore_alone"]["largest"])
    limit = (
        MAX_DIFFERENCE_FP32 if case.run["policy"].get("dtype") == "fp32" else MAX_DIFFERENCE_BF16
    )
    summary = f"scored alone, a token differs by {largest:.3g} nats (limit {limit:g})"
    return (failed_finding if largest > limit else passed_finding)(summary, largest=largest)


def _judge_padding(case: Case) -> Finding | None:
    """Return a finding if sampler and learner differ on the rows that a batch pads."""
    record = case.record
    if record.logp_sampler is None or record.logp_old is None:
        return None
    competition = case.measure_once(compete_on_sampler_gap, record)
    if competition.size < MIN_GAP or not competition.is_won_by(GapModel.LAYOUT):
        return None
    return failed_finding(
        f"sampler and learner are {competition.size:.3g} nats apart (limit {MIN_GAP:g}), and rows "
        f"with a shorter prompt than the longest hold "
        f"{competition.explained_by(GapModel.LAYOUT):.0%} of it: one side sees the padding",
        gap=competition.size,
    )


CHECK = Check(
    name="layout-changes-logp",
    description="padding, packing or a fused kernel changes the log-probs",
    stage=Stage.ALIGNMENT,
    needs=("run.policy",),
    fix="Pass the attention mask of the padding to every forward pass and to `generate`, pass "
    "position ids explicitly, mask attention between rows, and compare some rows with the same "
    "rows scored alone before every long run.",
    judge=judge_case,
    optional_needs=("probes.rescore_alone",),
    explains=(
        *("imprecise-logp", "temperature-on-one-side", "misaligned-logp", "stale-sampler"),
        *("hidden-sampling-transform", "wrong-reference", "loss-scaled-wrong"),
        *("kl-gradient-wrong", "stale-prefix-cache", "kl-tail-dominates"),
        "unexplained-gap",
        "gap-grows-with-position",
        "corrupted-sync",
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
