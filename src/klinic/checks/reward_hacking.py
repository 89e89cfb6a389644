"""reward-hacking: the reward rises and the skill that it measures does not."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from klinic.checks.base import Case, Check, Finding, Stage, failed, no_data, passed
from klinic.checks.measures import mean

SOME = 5  # steps compared at each end
FEW = 4  # min steps to rule out a rise
ROSE = 4.0  # standard errors
LIKELY = 2.0  # standard errors, if accuracy halved: a policy that merely drifted earns less
FLAT = 1.0  # standard errors, for few steps
FELL = 0.1  # drop of held-out accuracy: 100 prompts have an error of 0.05
HALVED = 0.05  # drop, if accuracy halved
ACCURACY = "eval/accuracy"


def judge(case: Case) -> Finding:
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
    rewards = _column(case.metrics, "reward")
    accuracy = _column(case.metrics, ACCURACY)
    if len(accuracy) < 2 or len(rewards) < 2 * SOME:
        return no_data(f"{len(accuracy)} evaluations (of 2) and {len(rewards)} steps (of 10)")
    rose, course = _rise(rewards)
    fell = float(accuracy[0] - accuracy[-1])
    halved = fell >= HALVED and accuracy[-1] <= accuracy[0] / 2
    wrong = (rose > LIKELY and halved) or (rose > ROSE and fell >= FELL)
    summary = (
        f"{course} (limit {LIKELY if halved else ROSE:g}), and accuracy went from "
        f"{accuracy[0]:.3g} to {accuracy[-1]:.3g} (limit {FELL:g} down)"
    )
    return (failed if wrong else passed)(summary, rose=rose, fell=fell)


def did_not_rise(case: Case) -> Finding | None:
    """Rule the cause out by the reward alone, if accuracy was not measured."""
    rewards = _column(case.metrics, "reward")
    if len(rewards) < FEW:
        return None
    rose, course = _rise(rewards)
    limit = LIKELY if len(rewards) >= 2 * SOME else FLAT
    return None if rose > limit else passed(f"{course} (limit {limit:g})", rose=rose)


def _rise(rewards: np.ndarray) -> tuple[float, str]:
    """Return the rise of the reward in standard errors, and a sentence that describes it."""
    some = min(SOME, len(rewards) // 2)
    first, last = rewards[:some], rewards[-some:]
    error = float(np.hypot(first.std(ddof=1), last.std(ddof=1)) / np.sqrt(some))
    before, after = mean(first), mean(last)
    rose = (after - before) / max(error, 1e-9)
    return rose, (
        f"the reward went from {before:.3g} to {after:.3g}, {rose:.1f} standard errors up"
    )


def _column(metrics: Mapping[int, Mapping[str, Any]], name: str) -> np.ndarray:
    known = [metrics[step][name] for step in sorted(metrics) if metrics[step].get(name) is not None]
    return np.asarray(known, dtype=np.float64)


CHECK = Check(
    name="reward-hacking",
    stage=Stage.DYNAMICS,
    needs=(f"metrics.{ACCURACY}", "metrics.reward"),
    fix="Read completions of high reward, remove rewards that can be earned without the skill, "
    "and tie the policy to its reference with a KL term.",
    judge=judge,
    alibi=did_not_rise,
    change={"kl.coef": 0.05},
    explains=("context-truncated", "equal-rewards", "kl-tail-dominates", "step-too-big"),
)
