"""Computes the metrics of a step from its record alone, so they can be recomputed from the files.

Names are TRL's where TRL has one. KL is KL(policy || reference) at `logp_old`, in nats per trained
token, never multiplied by a coefficient and never clamped.
"""

import numpy as np

from klinic.evidence.record import StepRecord
from klinic.evidence.trained_tokens import TrainedTokens, describe_tokens, drop_nan, sum_rows
from klinic.maths import kl
from klinic.maths.ratio import effective_sample_size, sequence_log_ratio

TAIL_FRACTION = 0.001  # fraction of tokens in `top_share`
LARGE_TOKEN_KL = 1.0  # nats: the token is e times as likely under one policy as under the other


def step_metrics(record: StepRecord) -> dict[str, float]:
    """Return every metric that the record has the columns for."""
    tokens = TrainedTokens(record)
    return {
        **_completion_metrics(record, tokens),
        **_advantage_metrics(record),
        **_policy_metrics(record, tokens),
        **kl_metrics(record, tokens),
        **teacher_metrics(record, tokens),
        **_sampler_metrics(record, tokens),
    }


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


def kl_metrics(record: StepRecord, tokens: TrainedTokens | None = None) -> dict[str, float]:
    """Return k3 as `kl`, and the distributions of k3, k1 and the exact KL.

    `tokens` are those of the record, where the caller has them.
    """
    tokens = tokens or TrainedTokens(record)
    if record.logp_ref is None or record.logp_old is None or not tokens.num:
        return {}
    logp_ref = tokens.select(record.logp_ref)
    both = {"logp_p": tokens.select(record.logp_old), "logp_q": logp_ref}
    k3 = kl.k3(**both)
    metrics = {"kl": float(k3.mean())}
    metrics |= _kl_distribution("kl_k3", k3, tokens)
    metrics |= _kl_distribution("kl_k1", kl.k1(**both), tokens)
    if record.kl_exact is not None:
        metrics |= _kl_distribution("kl_exact", tokens.select(record.kl_exact), tokens)
    metrics["logp_ref"] = float(logp_ref.mean())
    return metrics


def teacher_metrics(record: StepRecord, tokens: TrainedTokens | None = None) -> dict[str, float]:
    """Return k3 to the teacher as `teacher/kl`, and the distribution of k1."""
    tokens = tokens or TrainedTokens(record)
    if record.logp_teacher is None or record.logp_old is None or not tokens.num:
        return {}
    logp_teacher = tokens.select(record.logp_teacher)
    both = {"logp_p": tokens.select(record.logp_old), "logp_q": logp_teacher}
    return {
        "teacher/kl": float(kl.k3(**both).mean()),
        **_kl_distribution("teacher/kl_k1", kl.k1(**both), tokens),
        "logp_teacher": float(logp_teacher.mean()),
    }


def mean_k1(record: StepRecord) -> float | None:
    """Return `kl_k1/mean`, the input of KL controllers; None if it was not measured."""
    tokens = TrainedTokens(record)
    k1 = _trained_k1(record, tokens)
    if k1 is None:
        return None
    values, _ = drop_nan(k1, tokens.row_offsets)
    return float(values.mean()) if values.size else None


def _trained_k1(record: StepRecord, tokens: TrainedTokens) -> np.ndarray | None:
    """Return k1 of policy and reference at the trained tokens; None without both."""
    if record.logp_ref is None or record.logp_old is None:
        return None
    both = {"logp_p": tokens.select(record.logp_old), "logp_q": tokens.select(record.logp_ref)}
    k1: np.ndarray = kl.k1(**both)
    return k1


def penalized_reward(record: StepRecord, kl_coef: float) -> dict[str, float]:
    """Return the mean of the reward minus `kl_coef` times the completion's summed k1."""
    tokens = TrainedTokens(record)
    k1 = _trained_k1(record, tokens)
    if record.reward is None or k1 is None:
        return {}
    penalized = record.reward - kl_coef * sum_rows(k1, tokens.row_offsets)
    return {"reward/penalized": float(np.nanmean(penalized))} if _any_finite(penalized) else {}


def clip_metrics(
    record: StepRecord, *, clip_low: float, clip_high: float, by_sequence: bool = False
) -> dict[str, float]:
    """Return the fraction of trained tokens below, above and outside the clip range.

    Per token, or per completion where the loss clips the sequence ratio (gspo).
    """
    if record.logp is None or record.logp_old is None or record.advantage is None:
        return {}
    tokens = TrainedTokens(record)
    if not tokens.num:
        return {}
    both = {"logp": tokens.select(record.logp), "logp_old": tokens.select(record.logp_old)}
    log_ratio = both["logp"] - both["logp_old"]
    num_low = num_high = 0
    if log_ratio.any():  # a ratio of 1 is inside any clip range
        clipped = log_ratio
        if by_sequence:
            trained = np.ones(tokens.num, np.bool_)
            clipped = sequence_log_ratio(**both, loss_mask=trained, row_offsets=tokens.row_offsets)
        advantage = tokens.spread_rows(record.advantage)
        ratio = np.exp(np.minimum(clipped, 50.0))  # above any clip bound, but finite
        num_low = int(np.count_nonzero((ratio < 1 - clip_low) & (advantage < 0)))
        num_high = int(np.count_nonzero((ratio > 1 + clip_high) & (advantage > 0)))
    return {
        "clip_ratio/low_mean": num_low / tokens.num,
        "clip_ratio/high_mean": num_high / tokens.num,
        "clip_ratio/region_mean": (num_low + num_high) / tokens.num,
        "kl_update": float(-log_ratio.mean()),
    }


def update_kl(record: StepRecord) -> float:
    """Return KL(new || old) per trained token, from tokens of the old policy.

    k3 of new against old, weighted by the ratio: never negative, and unbiased.
    """
    if record.logp is None or record.logp_old is None or not record.loss_mask.any():
        return 0.0
    tokens = TrainedTokens(record)
    new, old = tokens.select(record.logp), tokens.select(record.logp_old)
    return float((np.exp(new - old) * kl.k3(logp_p=new, logp_q=old)).mean())


def _completion_metrics(record: StepRecord, tokens: TrainedTokens) -> dict[str, float]:
    lengths = np.diff(record.row_offsets)
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "num_tokens": float(tokens.num),
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
    numbers = [record.reward[record.group == group] for group in np.unique(record.group)]
    equal = [
        _any_finite(rewards) and float(np.nanmax(rewards) - np.nanmin(rewards)) == 0
        for rewards in numbers
    ]
    metrics = {"frac_reward_zero_std": float(np.mean(equal))}
    if record.advantage is not None:
        metrics["advantage/max"] = float(np.nanmax(np.abs(record.advantage)))
    return metrics


def _policy_metrics(record: StepRecord, tokens: TrainedTokens) -> dict[str, float]:
    columns = {"logp": record.logp_old, "entropy": record.entropy}
    return {
        name: float(tokens.select(values).mean())
        for name, values in columns.items()
        if values is not None and tokens.num
    }


def _sampler_metrics(record: StepRecord, tokens: TrainedTokens) -> dict[str, float]:
    if record.logp_sampler is None or record.logp_old is None:
        return {}
    reported = tokens.select(record.logp_sampler)
    is_finite = np.isfinite(reported)
    if not is_finite.any():
        return {}
    gap = tokens.select(record.logp_old) - reported
    if not is_finite.all():
        gap = gap[is_finite]
    size = np.abs(gap)
    return {
        "sampling/sampling_logp_difference/mean": float(size.mean()),
        "sampling/sampling_logp_difference/max": float(size.max()),
        "sampling/effective_sample_size": float(effective_sample_size(log_weight=gap)),
    }


def _kl_distribution(name: str, values: np.ndarray, tokens: TrainedTokens) -> dict[str, float]:
    """Return mean, extremes and tail of a per-token KL, and its mean and max per completion."""
    values, row_offsets = drop_nan(values, tokens.row_offsets)
    if not values.size:
        return {}
    found = describe_tokens(
        values, row_offsets, quantile=0.99, tail_fraction=TAIL_FRACTION, limit=LARGE_TOKEN_KL
    )
    return {
        f"{name}/mean": found.mean,
        f"{name}/min": found.smallest,
        f"{name}/max": found.largest,
        f"{name}/p99": found.quantile,
        f"{name}/top_share": found.tail_share,
        f"{name}/share_above": found.share_above,
        f"{name}/per_sequence": found.row_mean,
        f"{name}/per_sequence_max": found.row_largest,
    }


def _any_finite(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any())
