"""random-weights: the policy is untrained, as if its weights had not been loaded."""

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
from klinic.checks.measures import finite_trained_tokens, float64_column

MAX_ENTROPY_FRACTION = 0.8  # fraction of the uniform entropy; language models are below a third


def judge_case(case: Case) -> Finding:
    """Flag a policy that starts with an almost uniform distribution over tokens.

    Looks for
        The mean entropy before the first update, against the logarithm of the vocabulary size.
    Why it matters
        A model built from its config alone writes noise. Every reward is the lowest one, and
        weeks are spent on looking for the fault in the KL term.
    Confirmed when
        The entropy is above four fifths of the uniform distribution's.
    Ruled out when
        It is below: the policy prefers some tokens; or the recipe starts from random weights on
        purpose.
    Confused with
        malformed-output (the policy has learned a language, and not the answer format).
    """
    if case.learner_version != 0:
        return no_data_finding("the loaded weights can only be judged before the first update")
    if (case.run.get("policy") or {}).get("untrained"):
        return passed_finding("the recipe starts from random weights on purpose")
    mask = finite_trained_tokens(case.record, "entropy")
    if not mask.any():
        return no_data_finding("no trained tokens")
    entropy = float(float64_column(case.record, "entropy")[mask].mean())
    uniform_entropy = float(np.log(case.run["vocabulary_size"]))
    entropy_fraction = entropy / max(uniform_entropy, 1e-9)
    summary = (
        f"the first entropy is {entropy:.3g} nats, "
        f"{entropy_fraction:.0%} of that of a uniform policy "
        f"(limit {MAX_ENTROPY_FRACTION:.0%})"
    )
    return (failed_finding if entropy_fraction > MAX_ENTROPY_FRACTION else passed_finding)(
        summary, share=entropy_fraction
    )


CHECK = Check(
    name="random-weights",
    description="the policy is untrained, as if its weights had not been loaded",
    stage=Stage.ALIGNMENT,
    needs=("record.entropy", "facts.learner_version", "run.vocabulary_size"),
    fix="Load trained weights: model.name must be a folder or hub id with weights, or set "
    "warm_start.",
    judge=judge_case,
    explains=(
        *("malformed-output", "context-truncated", "equal-rewards", "cliff-rewards"),
        *("step-too-big", "kl-tail-dominates"),
    ),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
    ),
)
