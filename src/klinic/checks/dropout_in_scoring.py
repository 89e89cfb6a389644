"""dropout-in-scoring: the learner's forward pass is random."""

from klinic.checks.base import Case, Check, Finding, Stage, failed_finding, passed_finding

MAX_DIFFERENCE = 1e-4  # nats: equal tokens, weights, shapes and kernels give bit-identical results


def judge_case(case: Case) -> Finding:
    """Flag a learner whose forward pass is not deterministic.

    Looks for
        The largest difference between two scorings of the same tokens with the same weights.
    Why it matters
        Policy, old policy and reference are then scored by different random networks: a KL of
        thousands on the first step of a model with dropout, and ratios that are noise.
    Confirmed when
        Two scorings differ by more than 0.0001 nats.
    Ruled out when
        They are equal.
    Confused with
        layout-changes-logp (scoring twice agrees, scoring alone does not); wrong-reference (the
        gap to the reference is the same each time).
    """
    largest = float(case.probe_results["rescore"]["largest"])
    summary = f"scored twice, a token differs by {largest:.3g} nats (limit {MAX_DIFFERENCE:g})"
    return (failed_finding if largest > MAX_DIFFERENCE else passed_finding)(
        summary, largest=largest
    )


CHECK = Check(
    name="dropout-in-scoring",
    description="the learner's forward pass is random",
    stage=Stage.ALIGNMENT,
    needs=("probes.rescore",),
    fix="Set every dropout to 0 for policy, old policy and reference, including adapters.",
    judge=judge_case,
    explains=(
        *("layout-changes-logp", "imprecise-logp", "wrong-reference", "stale-sampler"),
        *("temperature-on-one-side", "misaligned-logp", "hidden-sampling-transform"),
        *("kl-gradient-wrong", "kl-not-applied", "kl-sign-flipped", "loss-scaled-wrong"),
        *("kl-tail-dominates", "step-too-big", "stale-prefix-cache"),
        "unexplained-gap",
        "gap-grows-with-position",
        "corrupted-sync",
    ),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.logp",
        "record.logp_old",
        "run.policy",
        "run.logp_old",
    ),
)
