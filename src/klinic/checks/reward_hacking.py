"""reward-hacking: the reward rises and the skill that it measures does not."""

from collections.abc import Mapping
from typing import Any

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
from klinic.checks.measures import mean

NUM_COMPARED_STEPS = 5  # steps compared at each end
MIN_STEPS = 4  # min steps to rule out a rise
MIN_RISE = 4.0  # standard errors
MIN_RISE_IF_HALVED = (
    2.0  # standard errors, if accuracy halved: a policy that merely drifted earns less
)
MAX_FLAT_RISE = 1.0  # standard errors, for few steps
MIN_ACCURACY_DROP = 0.1  # drop of held-out accuracy: 100 prompts have an error of 0.05
MIN_DROP_IF_HALVED = 0.05  # drop, if accuracy halved
ACCURACY = "eval/accuracy"


def judge_case(case: Case) -> Finding:
    """Flag a reward that is earned without the skill.

    Looks for
        The mean reward of the first and the last steps, and the held-out accuracy before
        training and now.
    Why it matters
        Optimisation follows the reward as written, not as intended: length, a format, a phrase.
        The training curves look excellent, and the model is worse.
    Confirmed when
        The reward rose by four standard errors, and the accuracy fell by 0.1; or it rose by
        two, and the accuracy fell by half and 0.05.
    Ruled out when
        Accuracy did not fall, or the reward did not rise.
    Confused with
        step-too-big (the reward falls too); broken-reward (rewards do not follow their
        definition).
    """
    rewards = _metric_series(case.metrics, "reward")
    accuracy = _metric_series(case.metrics, ACCURACY)
    if len(accuracy) < 2 or len(rewards) < 2 * NUM_COMPARED_STEPS:
        return no_data_finding(
            f"{len(accuracy)} evaluations (of 2) and {len(rewards)} steps (of 10)"
        )
    rose, sentence = _reward_rise(rewards)
    fell = float(accuracy[0] - accuracy[-1])
    halved = fell >= MIN_DROP_IF_HALVED and accuracy[-1] <= accuracy[0] / 2
    wrong = (rose > MIN_RISE_IF_HALVED and halved) or (
        rose > MIN_RISE and fell >= MIN_ACCURACY_DROP
    )
    summary = (
        f"{sentence} (limit {MIN_RISE_IF_HALVED if halved else MIN_RISE:g}), "
        "and accuracy went from "
        f"{accuracy[0]:.3g} to {accuracy[-1]:.3g} (limit {MIN_ACCURACY_DROP:g} down)"
    )
    return (failed_finding if wrong else passed_finding)(summary, rose=rose, fell=fell)


def rule_out_by_reward(case: Case) -> Finding | None:
    """Rule the cause out by the reward alone, if accuracy was not measured."""
    rewards = _metric_series(case.metrics, "reward")
    if len(rewards) < MIN_STEPS:
        return None
    rose, sentence = _reward_rise(rewards)
    limit = MIN_RISE_IF_HALVED if len(rewards) >= 2 * NUM_COMPARED_STEPS else MAX_FLAT_RISE
    return None if rose > limit else passed_finding(f"{sentence} (limit {limit:g})", rose=rose)


def _reward_rise(rewards: np.ndarray) -> tuple[float, str]:
    """Return the rise of the reward in standard errors, and a sentence that describes it."""
    num_steps = min(NUM_COMPARED_STEPS, len(rewards) // 2)
    first, last = rewards[:num_steps], rewards[-num_steps:]
    error = float(np.hypot(first.std(ddof=1), last.std(ddof=1)) / np.sqrt(num_steps))
    before, after = mean(first), mean(last)
    rose = (after - before) / max(error, 1e-9)
    return rose, (
        f"the reward went from {before:.3g} to {after:.3g}, {rose:.1f} standard errors up"
    )


def _metric_series(metrics: Mapping[int, Mapping[str, Any]], name: str) -> np.ndarray:
    values = [
        metrics[step][name] for step in sorted(metrics) if metrics[step].get(name) is not None
    ]
    return np.asarray(values, dtype=np.float64)


CHECK = Check(
    name="reward-hacking",
    description="the reward rises and the skill that it measures does not",
    stage=Stage.DYNAMICS,
    needs=(f"metrics.{ACCURACY}", "metrics.reward"),
    fix="Read completions of high reward, remove rewards that can be earned without the skill, "
    "and tie the policy to its reference with a KL term.",
    judge=judge_case,
    rule_out=rule_out_by_reward,
    change={"kl.coef": 0.05},
    explains=("context-truncated", "equal-rewards", "kl-tail-dominates", "step-too-big"),
    reads=(
        "record.reward",
        "record.reward_parts",
        "record.token_ids",
        "record.row_offsets",
    ),
)
