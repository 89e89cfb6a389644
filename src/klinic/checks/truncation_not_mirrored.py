"""truncation-not-mirrored: declared truncation moves the sampler far from the learner."""

import math
from collections.abc import Mapping

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
from klinic.checks.gap_tokens import declared_transforms
from klinic.checks.measures import logp_gap, mean

DEFAULT_CLIP = 0.2  # clip range of PPO and GRPO if run.json has none
MIN_TOKENS = 50  # tokens


def judge_case(case: Case) -> Finding:
    """Flag a declared truncation that the learner's log-probs do not repeat.

    Looks for
        Sampler log-probs raised above those of the learner, as a truncation does, although the
        recipe declares top-p, top-k or min-p.
    Why it matters
        The tokens come from a narrower distribution than the one that is scored and trained. A
        mild truncation is customary and harmless. A strong one moves the typical ratio out of
        the clip range before any update, and the policy is never trained on what it cuts off.
    Confirmed when
        A truncation wins among the explanations of the gap, and raises tokens in the mean by more
        than the clip range: -log(1 - 0.2), 0.22 nats, unless run.json has another range.
    Ruled out when
        Nothing is declared, the learner truncates too (no gap), or the truncation is mild.
    Confused with
        hidden-sampling-transform (nothing of the kind is declared); temperature-on-one-side
        (tokens are raised and lowered).
    """
    declared = declared_transforms(case.run["sampling"])
    if not declared:
        return passed_finding("the recipe declares no truncation")
    lift = logp_gap(case.record, "logp_sampler", "logp_old")
    if lift.size < MIN_TOKENS:
        return no_data_finding(
            f"fewer than {MIN_TOKENS} trained tokens have a log-prob of both sides"
        )
    limit = -math.log(1 - _clip_range(case.run.get("loss")))
    mean_lift = mean(lift)
    won = case.measure_once(compete_on_sampler_gap, case.record).is_won_by(GapModel.TRUNCATION)
    return (failed_finding if won and mean_lift > limit else passed_finding)(
        f"{declared} raises tokens by {mean_lift:+.3g} nats in the mean (limit {limit:.3g}: "
        "the clip range)",
        lift=mean_lift,
    )


def _clip_range(loss: object) -> float:
    clip = loss.get("clip_low") if isinstance(loss, Mapping) else None
    return float(clip) if isinstance(clip, float) and 0 < clip < 1 else DEFAULT_CLIP


CHECK = Check(
    name="truncation-not-mirrored",
    description="declared truncation moves the sampler far from the learner",
    stage=Stage.SAMPLER,
    needs=("record.logp_sampler", "record.logp_old", "run.sampling"),
    fix="Sample with top_p 1, top_k off and min_p 0 in training, or a milder truncation; or "
    "truncate the learner's logits to the same tokens, or correct with importance weights.",
    judge=judge_case,
    change={"sampling.top_p": 1.0, "sampling.top_k": 0, "sampling.min_p": 0.0},
    explains=("imprecise-logp", "broken-sampler", "unexplained-gap"),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.entropy",
        "run.loss",
        "run.logprob_mode",
    ),
)
