"""kl-not-applied: the KL term does not reach the gradient, or reaches it twice."""

from dataclasses import replace

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
from klinic.checks.loss_models import LOSS_FIELDS, Sign, identify_loss
from klinic.checks.measures import rule_out_without_kl

MAX_RATIO_ERROR = 0.03  # of the ratio: rounding of fp32 leaves 1e-6, of bf16 1e-2
PARALLEL_COSINE = 0.99  # cosine: twice the same gradient, not another one of twice the norm

MAX_DISTINCT = 0.7  # of the rows: with more kinds of reward in a group hardly any two are equal
ADVANTAGE_ROUNDING = 1e-5  # of the largest advantage


def judge_case(case: Case) -> Finding:
    """Flag a KL term that has no effect, or twice its effect.

    Looks for
        The change that the coefficient makes to the actual gradient, against the expected
        change. Without such a probe, the KL term in the recorded loss.
    Why it matters
        The KL is computed and logged at the cost of a reference pass, and the coefficient has
        no effect: a flag that an algorithm ignores, a detached value, a fast path without it.
    Confirmed when
        The change is 0, or twice the expected one, within 3%. Without a probe: the loss of the
        recent steps is the policy term alone, within rounding, for every form that fits, and the
        advantages follow from rewards without a KL.
    Ruled out when
        It is neither; or the run has no KL term. A change of 0 excludes loss-scaled-wrong,
        which would leave a fraction of it.
    Confused with
        kl-gradient-wrong (a gradient of another form arrives); kl-sign-flipped (the opposite
        arrives); moved-reference (the term is correct, and the KL is 0).
    """
    probe = case.probe_results["kl_gradient"]
    ratio, cosine = probe["ratio"], probe["cosine"]
    if ratio is None or cosine is None:
        return no_data_finding("policy and reference agree, so no term has a gradient yet")
    norm_ratio = float(probe["norm"] or 0) / max(float(probe["expected_norm"] or 0), 1e-300)
    nothing, twice = (
        norm_ratio < MAX_RATIO_ERROR,
        abs(ratio - 2) < 2 * MAX_RATIO_ERROR and cosine > PARALLEL_COSINE,
    )
    summary = (
        f"the coefficient changes the gradient by {ratio:.3f} times the expected change (limits: "
        f"not 0 and not 2, within {MAX_RATIO_ERROR:g})"
    )
    finding = (failed_finding if nothing or twice else passed_finding)(
        summary, ratio=float(ratio), size=norm_ratio
    )
    return replace(finding, excludes=("loss-scaled-wrong",)) if nothing else finding


def confirm_from_loss(case: Case) -> Finding | None:
    """Fail if the recorded loss contains no KL term, and the advantages contain none either."""
    fit = identify_loss(case)
    if fit is None or fit.signs.get("kl") is not Sign.ABSENT or _may_be_in_advantages(case):
        return None
    finding = failed_finding(f"{fit.sentence}: it contains no KL term", kl=fit.coefs.get("kl", 0.0))
    return replace(finding, excludes=("loss-scaled-wrong",))


def _may_be_in_advantages(case: Case) -> bool:
    """Return whether the rewards may have been reduced by a KL before the advantages.

    They were not if completions of a group with equal rewards have equal advantages: no two
    completions have the same KL.
    """
    record = case.record
    if "reward" in str(case.run.get("estimator")) or record.advantage is None:
        return True
    if record.reward is None or not np.isfinite(record.reward).all():
        return True
    kinds, kind = np.unique(
        np.stack([record.group, record.reward], axis=1), axis=0, return_inverse=True
    )
    kind = kind.reshape(-1)
    if len(kinds) > MAX_DISTINCT * record.num_rows:
        return True
    advantage = np.asarray(record.advantage, np.float64)
    low, high = np.full(len(kinds), np.inf), np.full(len(kinds), -np.inf)
    np.minimum.at(low, kind, advantage)
    np.maximum.at(high, kind, advantage)
    return bool((high - low).max() > ADVANTAGE_ROUNDING * max(np.abs(advantage).max(), 1e-9))


CHECK = Check(
    name="kl-not-applied",
    description="the KL term does not reach the gradient, or reaches it twice",
    stage=Stage.WIRING,
    needs=("probes.kl_gradient",),
    fix="Add the KL term to the loss exactly once, with its graph; reject options that drop it.",
    judge=judge_case,
    rule_out=rule_out_without_kl,
    confirm=confirm_from_loss,
    explains=("kl-gradient-wrong", "step-too-big", "reward-hacking"),
    reads=(
        "facts.kl_coef",
        "facts.grad_norm_kl",
        "run.estimator",
        "record.reward",
        "record.group",
        *LOSS_FIELDS,
    ),
)
