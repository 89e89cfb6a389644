"""step-too-big: every component is correct and the policy moves too far in a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from klinic.evidence.record import StepRecord

MAX_KL_IF_FALLEN = 0.3  # nats per token to the reference, if rewards have fallen
MIN_REWARD_DROP = 4.0  # standard errors by which rewards are below those before the drift
MAX_KL_WITHOUT_GAIN = 1.0  # nats per token: learning that moves so far raises the reward
MIN_GAIN_FRACTION = 0.1  # of the gain that a KL of D can buy at best: sqrt(2 D) deviations
NUM_ERRORS = 2.0  # standard errors by which a gain may be larger than it was measured
NUM_STEPS = 3  # last steps whose rewards are averaged
MIN_MEDIAN_K1 = 0.02  # nats: the whole policy has moved, not a few tokens


def judge_case(case: Case) -> Finding:
    """Flag a policy that drifts away from its reference while its reward falls.

    Looks for
        k1 to the reference, its median, and the rewards of the steps far from the reference,
        against those of the steps before the drift.
    Why it matters
        Too large a learning rate, too small a coefficient, an entropy bonus: the KL rises
        slowly and then fast, rewards fall, and completions turn into noise.
    Confirmed when
        k1 is above 0.3 nats per token and not because of a few tokens, and the rewards of the
        last such steps are four standard errors below those before; or k1 is above 1, and two
        standard errors above its measured value the gain of all such steps is still below a
        tenth of what that KL can buy.
    Ruled out when
        The KL is small, or it is high and the reward is not lower: that is learning. A reward
        that fell excludes reward-hacking.
    Confused with
        everything else: it is named only if every cause that could explain it is ruled out;
        reward-hacking (the reward rises).
    """
    if case.start is None or case.learner_version == 0:
        return no_data_finding("the step before the first update and one after it are needed")
    drift = case.measure_once(_measure_drift, case.record)
    near, last, far = _rewards_by_drift(case)
    if drift is None or near is None or case.measure_once(mean_reward, case.record) is None:
        return no_data_finding("no trained tokens, or too few groups with a reward")
    fell = 0.0 if last is None else -last.gain_over(near)
    has_no_gain = drift.mean > MAX_KL_WITHOUT_GAIN and _has_no_gain(near, far, drift.mean)
    wrong = drift.median > MIN_MEDIAN_K1 and (fell > MIN_REWARD_DROP or has_no_gain)
    reward = near.mean if last is None else last.mean
    summary = (
        f"k1 to the reference is {drift.mean:.3g} nats per token (limit "
        f"{MAX_KL_IF_FALLEN:g}) and the reward went "
        f"from {near.mean:.3g} to {reward:.3g}: {fell:.1f} standard "
        f"errors down (limit {MIN_REWARD_DROP:g})"
    )
    finding = (failed_finding if wrong else passed_finding)(summary, kl=drift.mean, fell=fell)
    return replace(finding, excludes=("reward-hacking",)) if fell > MIN_REWARD_DROP else finding


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drift:
    """k1 of a step to the reference."""

    mean: float
    median: float


def _measure_drift(record: StepRecord) -> _Drift | None:
    if record.logp_old is None or record.logp_ref is None:
        return None
    k1 = logp_gap(record, "logp_old", "logp_ref")
    return _Drift(mean=mean(k1), median=median(np.abs(k1))) if k1.size else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PooledReward:
    """Mean reward of some steps."""

    mean: float
    error: float
    deviation: float
    """Standard deviation of the rewards of all completions."""

    def gain_over(self, before: "_PooledReward") -> float:
        """Return the gain in standard errors."""
        return (self.mean - before.mean) / max(math.hypot(self.error, before.error), 1e-9)


def _rewards_by_drift(
    case: Case,
) -> tuple[_PooledReward | None, _PooledReward | None, _PooledReward | None]:
    """Return the rewards of the steps before the drift, of the last ones in it, and far away.

    The last ones are at most `NUM_STEPS` in a row up to this step.
    """
    start = () if case.start is None or case.start in case.recent_records else (case.start,)
    steps = [
        (record, drift.mean)
        for record in (*start, *case.recent_records)
        if (drift := case.measure_once(_measure_drift, record)) is not None
    ]
    near = [record for record, k1 in steps if k1 <= MAX_KL_IF_FALLEN]
    far = [record for record, k1 in steps if k1 > MAX_KL_WITHOUT_GAIN]
    num_last = next(
        (num for num, (_, k1) in enumerate(reversed(steps)) if k1 <= MAX_KL_IF_FALLEN), len(steps)
    )
    last = [record for record, _ in steps[len(steps) - min(num_last, NUM_STEPS) :]]
    return _pool_rewards(case, near), _pool_rewards(case, last), _pool_rewards(case, far)


def _pool_rewards(case: Case, records: Sequence[StepRecord]) -> _PooledReward | None:
    # a set: updates on one generation record its rewards again
    measured = {case.measure_once(mean_reward, record) for record in records} - {None}
    values = np.array(sorted(value for value in measured if value is not None))
    if not len(values):
        return None
    rewards = np.concatenate([r.reward for r in records if r.reward is not None])
    return _PooledReward(
        mean=float(values[:, 0].mean()),
        error=float(np.sqrt(np.square(values[:, 1]).sum()) / len(values)),
        deviation=float(rewards[np.isfinite(rewards)].std()),
    )


def _has_no_gain(near: _PooledReward, far: _PooledReward | None, k1: float) -> bool:
    """Whether even an optimistic gain is below a fraction of what such a KL can buy.

    The mean of a reward with Gaussian tails rises by at most sqrt(2 D) of its standard deviations
    in a policy at KL D (Donsker-Varadhan). k1 is per token, so D is at least k1.
    """
    if far is None:
        return False
    error = math.hypot(near.error, far.error)
    largest = far.mean - near.mean + NUM_ERRORS * error
    return largest < MIN_GAIN_FRACTION * math.sqrt(2 * k1) * near.deviation


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
