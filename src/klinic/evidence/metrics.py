"""Computes the metrics of a step from its record alone, so they can be recomputed from the files.

Names are TRL's where TRL has one. KL is KL(policy || reference) at `logp_old`, in nats per trained
token, never multiplied by a coefficient and never clamped.

Where several processes hold the rows, each calls `token_metrics` with its own rows and gets those
of the step: sums are added, and order statistics are exact. `row_metrics` needs every row, and no
column of tokens.
"""

import numpy as np

from klinic.evidence.measures import (
    Clipping,
    ClipRange,
    ColumnMeans,
    Measure,
    PenalizedReward,
    SampledKL,
    SamplerGap,
    UpdateKL,
    measure_tokens,
)
from klinic.evidence.merging import ONE_PROCESS, Merge
from klinic.evidence.record import StepRecord
from klinic.evidence.trained_tokens import TrainedTokens, drop_nan
from klinic.maths import kl

KL_NAMES = {"mean": "kl", "k3": "kl_k3", "k1": "kl_k1", "exact": "kl_exact"}
TEACHER_KL_NAMES = {"mean": "teacher/kl", "k1": "teacher/kl_k1"}


def step_metrics(record: StepRecord) -> dict[str, float]:
    """Return every metric that the record has the columns for."""
    return row_metrics(record) | token_metrics(record)


def logged_metrics(record: StepRecord, *, kl_coef: float | None) -> dict[str, float]:
    """Return facts, mean rewards and `step_metrics` of a step, for metrics.jsonl."""
    facts = {name: record.facts.get(name) for name in ("loss", "grad_norm", "learning_rate")}
    metrics = {name: float(value) for name, value in facts.items() if value is not None}
    if kl_coef is not None:
        metrics["kl_coef"] = kl_coef
    rewards = {
        "reward": record.reward,
        **{f"rewards/{name}/mean": part for name, part in record.reward_parts.items()},
    }
    for name, values in rewards.items():
        if values is not None and np.isfinite(values).any():
            metrics[name] = float(np.nanmean(values))
    return metrics | step_metrics(record)


def row_metrics(record: StepRecord) -> dict[str, float]:
    """Return the metrics of the completions: lengths, finish reasons, rewards, advantages."""
    return _completion_metrics(record) | _advantage_metrics(record)


def token_metrics(
    record: StepRecord,
    *,
    clip: ClipRange | None = None,
    kl_coef: float | None = None,
    merge: Merge = ONE_PROCESS,
) -> dict[str, float]:
    """Return the metrics of the trained tokens, with those of the updates if they are asked for.

    `clip` adds `clip_metrics`, and `kl_coef` adds `penalized_reward`.
    """
    num = _num_trained(record, merge)
    measures: list[Measure] = [*_policy_measures(record), *_kl_measures(record, num)]
    measures += [*_teacher_measures(record, num), *_sampler_measures(record)]
    if clip is not None:
        measures += _clip_measures(record, clip)
    if kl_coef is not None:
        measures += _penalty_measures(record, kl_coef)
    return {"num_tokens": float(num), **measure_tokens(record, measures, num, merge)}


def updates_metrics(
    first: StepRecord,
    last: StepRecord,
    *,
    clip: ClipRange,
    kl_coef: float,
    merge: Merge = ONE_PROCESS,
) -> dict[str, float]:
    """Return the token metrics of the first update of a batch, clipped fractions of its last."""
    if first is last:
        return token_metrics(first, clip=clip, kl_coef=kl_coef, merge=merge)
    clipped = measure_tokens(last, _clip_measures(last, clip), _num_trained(last, merge), merge)
    return token_metrics(first, kl_coef=kl_coef, merge=merge) | clipped


def kl_metrics(record: StepRecord) -> dict[str, float]:
    """Return k3 as `kl`, and the distributions of k3, k1 and the exact KL."""
    num = _num_trained(record)
    return measure_tokens(record, _kl_measures(record, num), num, ONE_PROCESS)


def mean_k1(record: StepRecord, merge: Merge = ONE_PROCESS) -> float | None:
    """Return `kl_k1/mean`, the input of KL controllers; None if it was not measured."""
    if record.logp_ref is None or record.logp_old is None:
        return None
    tokens = TrainedTokens(record)
    with np.errstate(invalid="ignore"):  # of values that are not finite
        k1 = kl.k1(logp_p=tokens.select(record.logp_old), logp_q=tokens.select(record.logp_ref))
        values, _ = drop_nan(k1, tokens.row_offsets)
        total, num = merge.sum(np.array([values.sum(), values.size]))
    return float(total / num) if num else None


def penalized_reward(record: StepRecord, kl_coef: float) -> dict[str, float]:
    """Return the mean of the reward minus `kl_coef` times the completion's summed k1."""
    measures = _penalty_measures(record, kl_coef)
    return measure_tokens(record, measures, _num_trained(record), ONE_PROCESS)


def clip_metrics(
    record: StepRecord, *, clip_low: float, clip_high: float, by_sequence: bool = False
) -> dict[str, float]:
    """Return the fraction of trained tokens below, above and outside the clip range.

    Per token, or per completion where the loss clips the sequence ratio (gspo).
    """
    clip = ClipRange(low=clip_low, high=clip_high, by_sequence=by_sequence)
    measures = _clip_measures(record, clip)
    return measure_tokens(record, measures, _num_trained(record), ONE_PROCESS)


def update_kl(record: StepRecord, merge: Merge = ONE_PROCESS) -> float:
    """Return KL(new || old) per trained token, from tokens of the old policy.

    k3 of new against old, weighted by the ratio: never negative, and unbiased.
    """
    if record.logp is None or record.logp_old is None:
        return 0.0
    measures = [UpdateKL(logp=record.logp, logp_old=record.logp_old)]
    return measure_tokens(record, measures, _num_trained(record, merge), merge)["update_kl"]


def _num_trained(record: StepRecord, merge: Merge = ONE_PROCESS) -> int:
    return int(merge.sum(np.array(np.count_nonzero(record.loss_mask))))


def _policy_measures(record: StepRecord) -> list[Measure]:
    columns = {"logp": record.logp_old, "entropy": record.entropy}
    return [ColumnMeans({name: c for name, c in columns.items() if c is not None})]


def _kl_measures(record: StepRecord, num_tokens: int) -> list[Measure]:
    if record.logp_ref is None or record.logp_old is None:
        return []
    sampled = SampledKL(
        KL_NAMES,
        logp_old=record.logp_old,
        logp_other=record.logp_ref,
        kl_exact=record.kl_exact,
        num_tokens=num_tokens,
    )
    return [sampled, ColumnMeans({"logp_ref": record.logp_ref})]


def _teacher_measures(record: StepRecord, num_tokens: int) -> list[Measure]:
    if record.logp_teacher is None or record.logp_old is None:
        return []
    sampled = SampledKL(
        TEACHER_KL_NAMES,
        logp_old=record.logp_old,
        logp_other=record.logp_teacher,
        kl_exact=None,
        num_tokens=num_tokens,
    )
    return [sampled, ColumnMeans({"logp_teacher": record.logp_teacher})]


def _sampler_measures(record: StepRecord) -> list[Measure]:
    if record.logp_sampler is None or record.logp_old is None:
        return []
    return [SamplerGap(logp_old=record.logp_old, logp_sampler=record.logp_sampler)]


def _clip_measures(record: StepRecord, clip: ClipRange) -> list[Measure]:
    if record.logp is None or record.logp_old is None or record.advantage is None:
        return []
    return [Clipping(clip, logp=record.logp, logp_old=record.logp_old, advantage=record.advantage)]


def _penalty_measures(record: StepRecord, kl_coef: float) -> list[Measure]:
    if record.logp_ref is None or record.logp_old is None or record.reward is None:
        return []
    return [
        PenalizedReward(
            logp_old=record.logp_old,
            logp_ref=record.logp_ref,
            reward=record.reward,
            kl_coef=kl_coef,
        )
    ]


def _completion_metrics(record: StepRecord) -> dict[str, float]:
    lengths = np.diff(record.row_offsets)
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
    }
    if record.finish_reason is not None:
        cut = record.finish_reason == "length"
        metrics["completions/clipped_ratio"] = float(cut.mean())
        if not cut.all():
            metrics["completions/mean_terminated_length"] = float(lengths[~cut].mean())
    return metrics


def _advantage_metrics(record: StepRecord) -> dict[str, float]:
    if record.reward is None or not _any_finite(record.reward):
        return {}
    order = np.argsort(record.group, kind="stable")
    starts = np.flatnonzero(np.diff(record.group[order], prepend=record.group[order[0]] - 1))
    reward = record.reward[order]
    with np.errstate(invalid="ignore"):  # of infinite rewards
        spread = np.fmax.reduceat(reward, starts) - np.fmin.reduceat(reward, starts)
    metrics = {"frac_reward_zero_std": float(np.mean(spread == 0))}
    if record.advantage is not None:
        metrics["advantage/max"] = float(np.nanmax(np.abs(record.advantage)))
    return metrics


def _any_finite(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any())
