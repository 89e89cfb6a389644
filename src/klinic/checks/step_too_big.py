"""step-too-big: every component is correct and the policy moves too far in a step."""

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
from klinic.checks.measures import logp_gap, mean, mean_reward, median

MAX_KL_IF_FALLEN = 0.3  # nats per token to the reference, if rewards have fallen
MIN_REWARD_DROP = 4.0  # standard errors by which the reward is below that of the first step
MAX_KL_WITHOUT_GAIN = 1.0  # nats per token: learning that moves so far raises the reward
MIN_REWARD_GAIN = 2.0  # standard errors by which the reward of the last steps is above the first
NUM_STEPS = 3  # last steps whose rewards are averaged
MIN_MEDIAN_K1 = 0.02  # nats: the whole policy has moved, not a few tokens


def judge_case(case: Case) -> Finding:
    """Flag a policy that drifts away from its reference while its reward falls.

    Looks for
        k1 to the reference, its median, and the reward, against the first step.
    Why it matters
        Too large a learning rate, too small a coefficient, an entropy bonus: the KL rises
        slowly and then fast, rewards fall, and completions turn into noise.
    Confirmed when
        k1 is above 0.3 nats per token and not because of a few tokens, and the reward is four
        standard errors below that of the first step; or k1 is above 1 and three steps show no
        higher reward.
    Ruled out when
        The KL is small, or it is high and the reward is not lower: that is learning. A reward
        that fell excludes reward-hacking.
    Confused with
        everything else: it is named only if every cause that could explain it is ruled out;
        reward-hacking (the reward rises).
    """
    if case.start is None or case.learner_version == 0:
        return no_data_finding("the step before the first update and one after it are needed")
    k1 = logp_gap(case.record, "logp_old", "logp_ref")
    first, now = (
        case.measure_once(mean_reward, case.start),
        case.measure_once(mean_reward, case.record),
    )
    if not k1.size or first is None or now is None:
        return no_data_finding("no trained tokens, or too few groups with a reward")
    mean_k1, median_k1 = mean(k1), median(np.abs(k1))
    error = float(np.hypot(first[1], now[1]))
    fell = (first[0] - now[0]) / max(error, 1e-9)
    gained = _reward_gain(case, first)
    without_gain = mean_k1 > MAX_KL_WITHOUT_GAIN and gained is not None and gained < MIN_REWARD_GAIN
    wrong = median_k1 > MIN_MEDIAN_K1 and (
        (mean_k1 > MAX_KL_IF_FALLEN and fell > MIN_REWARD_DROP) or without_gain
    )
    summary = (
        f"k1 to the reference is {mean_k1:.3g} nats per token (limit "
        f"{MAX_KL_IF_FALLEN:g}) and the reward went "
        f"from {first[0]:.3g} to {now[0]:.3g}: {fell:.1f} standard "
        f"errors down (limit {MIN_REWARD_DROP:g})"
    )
    finding = (failed_finding if wrong else passed_finding)(summary, kl=mean_k1, fell=fell)
    return replace(finding, excludes=("reward-hacking",)) if fell > MIN_REWARD_DROP else finding


def _reward_gain(case: Case, first: tuple[float, float]) -> float | None:
    """Return the gain in reward of the last steps over the first, in standard errors."""
    rewards = [
        case.measure_once(mean_reward, record) for record in case.recent_records[-NUM_STEPS:]
    ]
    last = [reward for reward in rewards if reward is not None]
    if len(last) < NUM_STEPS or case.recent_records[-NUM_STEPS].facts.get("learner_version") == 0:
        return None
    mean_last = float(np.mean([reward for reward, _ in last]))
    error = float(np.hypot(first[1], np.mean([e for _, e in last]) / np.sqrt(NUM_STEPS)))
    return (mean_last - first[0]) / max(error, 1e-9)


CHECK = Check(
    name="step-too-big",
    description="every component is correct and the policy moves too far in a step",
    stage=Stage.DYNAMICS,
    needs=("record.logp_old", "record.logp_ref", "record.reward", "facts.learner_version"),
    fix="Lower the learning rate, raise or adapt kl.coef, remove an entropy bonus, and enable "
    "recovery to roll back.",
    judge=judge_case,
    change={"kl.controller": "log_pi", "recovery": {}},
    explains=("kl-tail-dominates", "equal-rewards"),
    reads=(
        "record.loss_mask",
        "record.row_offsets",
        "record.logp",
        "facts.kl_coef",
        "facts.learning_rate",
        "facts.entropy_coef",
        "facts.grad_norm",
        "facts.grad_norm_kl",
        "facts.update_norm",
        "metrics.entropy",
        "metrics.clip_ratio",
        "run.policy",
    ),
)
