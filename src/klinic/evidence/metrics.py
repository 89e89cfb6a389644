"""Computes the metrics of a step from its record alone, so they can be recomputed from the files.

Names are TRL's where TRL has one. KL is KL(policy || reference) at `logp_old`, in nats per trained
token, never multiplied by a coefficient and never clamped.
"""

import numpy as np

from klinic.evidence.record import StepRecord
from klinic.maths import kl
from klinic.maths.arrays import row_of_token, segment_sum
from klinic.maths.ratio import effective_sample_size, sequence_log_ratio

TAIL_FRACTION = 0.001  # fraction of tokens in `top_share`
LARGE_TOKEN_KL = 1.0  # nats: the token is e times as likely under one policy as under the other


def step_metrics(record: StepRecord) -> dict[str, float]:
    """Return every metric that the record has the columns for."""
    metrics = {
        **_completion_metrics(record),
        **_advantage_metrics(record),
        **_policy_metrics(record),
    }
    metrics |= kl_metrics(record)
    metrics |= teacher_metrics(record)
    return metrics | _sampler_metrics(record)


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


def kl_metrics(record: StepRecord) -> dict[str, float]:
    """Return k3 as `kl`, and the distributions of k3, k1 and the exact KL."""
    if record.logp_ref is None or record.logp_old is None or not record.loss_mask.any():
        return {}
    both = {"logp_p": _to_float64(record.logp_old), "logp_q": _to_float64(record.logp_ref)}
    k3, k1 = kl.k3(**both), kl.k1(**both)
    metrics = {"kl": float(k3[record.loss_mask].mean())}
    metrics |= _kl_distribution("kl_k3", k3, record) | _kl_distribution("kl_k1", k1, record)
    if record.kl_exact is not None:
        metrics |= _kl_distribution("kl_exact", _to_float64(record.kl_exact), record)
    metrics["logp_ref"] = float(_to_float64(record.logp_ref)[record.loss_mask].mean())
    return metrics


def teacher_metrics(record: StepRecord) -> dict[str, float]:
    """Return k3 to the teacher as `teacher/kl`, and the distribution of k1."""
    if record.logp_teacher is None or record.logp_old is None or not record.loss_mask.any():
        return {}
    both = {"logp_p": _to_float64(record.logp_old), "logp_q": _to_float64(record.logp_teacher)}
    return {
        "teacher/kl": float(kl.k3(**both)[record.loss_mask].mean()),
        **_kl_distribution("teacher/kl_k1", kl.k1(**both), record),
        "logp_teacher": float(both["logp_q"][record.loss_mask].mean()),
    }


def mean_k1(record: StepRecord) -> float | None:
    """Return `kl_k1/mean`, the input of KL controllers; None if it was not measured."""
    if record.logp_ref is None or record.logp_old is None:
        return None
    k1 = kl.k1(logp_p=_to_float64(record.logp_old), logp_q=_to_float64(record.logp_ref))
    tokens = k1[record.loss_mask & ~np.isnan(k1)]
    return float(tokens.mean()) if tokens.size else None


def penalized_reward(record: StepRecord, kl_coef: float) -> dict[str, float]:
    """Return the mean of the reward minus `kl_coef` times the completion's summed k1."""
    if record.reward is None or record.logp_ref is None or record.logp_old is None:
        return {}
    k1 = kl.k1(logp_p=_to_float64(record.logp_old), logp_q=_to_float64(record.logp_ref))
    penalized = record.reward - kl_coef * _row_sums(np.where(record.loss_mask, k1, 0.0), record)
    return {"reward/penalized": float(np.nanmean(penalized))} if _any_finite(penalized) else {}


def clip_metrics(
    record: StepRecord, *, clip_low: float, clip_high: float, by_sequence: bool = False
) -> dict[str, float]:
    """Return the fraction of trained tokens below, above and outside the clip range.

    Per token, or per completion where the loss clips the sequence ratio (gspo).
    """
    trained = record.loss_mask
    if record.logp is None or record.logp_old is None or record.advantage is None:
        return {}
    if not trained.any():
        return {}
    both = {"logp": _to_float64(record.logp), "logp_old": _to_float64(record.logp_old)}
    log_ratio = both["logp"] - both["logp_old"]
    clipped = log_ratio
    if by_sequence:
        clipped = sequence_log_ratio(**both, loss_mask=trained, row_offsets=record.row_offsets)
    advantage = record.advantage[row_of_token(record.row_offsets)]
    ratio = np.exp(np.minimum(clipped, 50.0))  # above any clip bound, but finite
    low = (ratio < 1 - clip_low) & (advantage < 0)
    high = (ratio > 1 + clip_high) & (advantage > 0)
    return {
        "clip_ratio/low_mean": float(low[trained].mean()),
        "clip_ratio/high_mean": float(high[trained].mean()),
        "clip_ratio/region_mean": float((low | high)[trained].mean()),
        "kl_update": float(-log_ratio[trained].mean()),
    }


def update_kl(record: StepRecord) -> float:
    """Return KL(new || old) per trained token, from tokens of the old policy.

    k3 of new against old, weighted by the ratio: never negative, and unbiased.
    """
    trained = record.loss_mask
    if record.logp is None or record.logp_old is None or not trained.any():
        return 0.0
    new, old = _to_float64(record.logp)[trained], _to_float64(record.logp_old)[trained]
    return float((np.exp(new - old) * kl.k3(logp_p=new, logp_q=old)).mean())


def _completion_metrics(record: StepRecord) -> dict[str, float]:
    lengths = np.diff(record.row_offsets)
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "num_tokens": float(record.loss_mask.sum()),
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


def _policy_metrics(record: StepRecord) -> dict[str, float]:
    metrics = {}
    trained = record.loss_mask
    if not trained.any():
        return {}
    if record.logp_old is not None:
        metrics["logp"] = float(_to_float64(record.logp_old)[trained].mean())
    if record.entropy is not None:
        metrics["entropy"] = float(_to_float64(record.entropy)[trained].mean())
    return metrics


def _sampler_metrics(record: StepRecord) -> dict[str, float]:
    if record.logp_sampler is None or record.logp_old is None:
        return {}
    reported = record.loss_mask & np.isfinite(record.logp_sampler)
    if not reported.any():
        return {}
    gap = (_to_float64(record.logp_old) - _to_float64(record.logp_sampler))[reported]
    return {
        "sampling/sampling_logp_difference/mean": float(np.abs(gap).mean()),
        "sampling/sampling_logp_difference/max": float(np.abs(gap).max()),
        "sampling/effective_sample_size": float(effective_sample_size(log_weight=gap)),
    }


def _kl_distribution(name: str, values: np.ndarray, record: StepRecord) -> dict[str, float]:
    """Return mean, extremes and tail of a per-token KL, and its mean and max per completion."""
    trained = record.loss_mask & ~np.isnan(values)
    if not trained.any():
        return {}
    tokens = values[trained]
    size = np.sort(np.abs(tokens))
    tail = size[-max(1, round(TAIL_FRACTION * size.size)) :].sum() / max(size.sum(), 1e-300)
    rows = row_of_token(record.row_offsets)[trained]
    sums = segment_sum(tokens, rows, record.num_rows)[np.unique(rows)]
    return {
        f"{name}/mean": float(tokens.mean()),
        f"{name}/min": float(tokens.min()),
        f"{name}/max": float(tokens.max()),
        f"{name}/p99": float(np.quantile(tokens, 0.99)),
        f"{name}/top_share": float(tail),
        f"{name}/share_above": float((np.abs(tokens) > LARGE_TOKEN_KL).mean()),
        f"{name}/per_sequence": float(sums.mean()),
        f"{name}/per_sequence_max": float(sums.max()),
    }


def _row_sums(values: np.ndarray, record: StepRecord) -> np.ndarray:
    sums: np.ndarray = segment_sum(values, row_of_token(record.row_offsets), record.num_rows)
    return sums


def _to_float64(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)


def _any_finite(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any())
