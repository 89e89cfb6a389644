"""random-weights: the policy is untrained, as if its weights had not been loaded."""

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import column, known_tokens

SHARE = 0.8  # fraction of the uniform entropy; language models are below a third


def judge(case: Case) -> Finding:
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
    if case.version != 0:
        return no_data("the loaded weights can only be judged before the first update")
    if (case.run.get("policy") or {}).get("untrained"):
        return passed("the recipe starts from random weights on purpose")
    known = known_tokens(case.record, "entropy")
    if not known.any():
        return no_data("no trained tokens")
    entropy = float(column(case.record, "entropy")[known].mean())
    most = float(np.log(case.run["vocabulary_size"]))
    share = entropy / max(most, 1e-9)
    summary = (
        f"the first entropy is {entropy:.3g} nats, {share:.0%} of that of a uniform policy "
        f"(limit {SHARE:.0%})"
    )
    return (failed if share > SHARE else passed)(summary, share=share)


CHECK = Check(
    name="random-weights",
    stage=Stage.ALIGNMENT,
    needs=("record.entropy", "facts.learner_version", "run.vocabulary_size"),
    fix="Load trained weights: model.name must be a folder or hub id with weights, or set "
    "warm_start.",
    judge=judge,
    explains=(
        *("malformed-output", "context-truncated", "equal-rewards", "cliff-rewards"),
        *("step-too-big", "kl-tail-dominates"),
    ),
)
