"""Metrics of a step against plain definitions over sorted values and loops over rows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from metric_records import TOLERANCE, assert_metrics_close, random_record

from klinic.evidence import trained_tokens
from klinic.evidence.metrics import (
    clip_metrics,
    mean_k1,
    penalized_reward,
    step_metrics,
    update_kl,
)
from klinic.evidence.token_tally import LargestValues

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
SUMS_IN_ANOTHER_ORDER = ("/top_share", "/per_sequence", "/per_sequence_max", "reward/penalized")


def all_metrics(record, *, by_sequence=False):
    return (
        step_metrics(record)
        | clip_metrics(record, **CLIP, by_sequence=by_sequence)
        | penalized_reward(record, 0.1)
        | {"mean_k1": mean_k1(record), "update_kl": update_kl(record)}
    )


def plain_distribution(name, values, record):
    kept = record.loss_mask & ~np.isnan(values)
    tokens = values[kept]
    if not tokens.size:
        return {}
    ordered = np.sort(np.abs(tokens))
    tail = ordered[-max(1, round(0.001 * len(ordered))) :]
    rows = [(values[a:b][kept[a:b]]) for a, b in row_spans(record)]
    sums = [sum(row.tolist()) for row in rows if row.size]
    return {
        f"{name}/mean": tokens.mean(),
        f"{name}/min": tokens.min(),
        f"{name}/max": tokens.max(),
        f"{name}/p99": np.quantile(tokens, 0.99),
        f"{name}/top_share": tail.sum() / max(ordered.sum(), 1e-300),
        f"{name}/share_above": np.mean(np.abs(tokens) > 1.0),
        f"{name}/per_sequence": np.mean(sums),
        f"{name}/per_sequence_max": max(sums),
    }


def row_spans(record):
    return zip(record.row_offsets[:-1], record.row_offsets[1:], strict=True)


def plain_kls(record):
    old = record.logp_old.astype(np.float64)
    trained, metrics = record.loss_mask, {}
    for prefix, other in (("", record.logp_ref), ("teacher/", record.logp_teacher)):
        d = other.astype(np.float64) - old
        k3, k1 = np.expm1(d) - d, -d
        metrics[f"{prefix}kl"] = k3[trained].mean()
        metrics |= plain_distribution(f"{prefix}kl_k1", k1, record)
        if not prefix:
            metrics |= plain_distribution("kl_k3", k3, record)
            exact = record.kl_exact.astype(np.float64)
            metrics |= plain_distribution("kl_exact", exact, record)
    for name in ("logp_ref", "logp_teacher", "entropy"):
        metrics[name] = getattr(record, name).astype(np.float64)[trained].mean()
    return metrics | {"logp": old[trained].mean()}


def plain_clipping(record, *, by_sequence):
    log_ratio = record.logp.astype(np.float64) - record.logp_old.astype(np.float64)
    low, high, trained = [], [], record.loss_mask
    for (a, b), advantage in zip(row_spans(record), record.advantage, strict=True):
        row = log_ratio[a:b][trained[a:b]]
        ratio = np.exp(np.full(row.shape, row.mean()) if by_sequence and row.size else row)
        low += list((ratio < 1 - CLIP["clip_low"]) & (advantage < 0))
        high += list((ratio > 1 + CLIP["clip_high"]) & (advantage > 0))
    new, old = (x.astype(np.float64)[trained] for x in (record.logp, record.logp_old))
    k3 = np.expm1(old - new) - (old - new)
    return {
        "clip_ratio/low_mean": np.mean(low),
        "clip_ratio/high_mean": np.mean(high),
        "clip_ratio/region_mean": np.mean(np.array(low) | np.array(high)),
        "kl_update": -log_ratio[trained].mean(),
        "update_kl": (np.exp(new - old) * k3).mean(),
    }


def plain_metrics(record, *, by_sequence=False):
    if not record.loss_mask.any():
        return {"update_kl": 0.0, "mean_k1": None}
    trained = record.loss_mask
    reported = trained & np.isfinite(record.logp_sampler)
    gap = record.logp_old[reported].astype(np.float64) - record.logp_sampler[reported]
    metrics = plain_kls(record) | plain_clipping(record, by_sequence=by_sequence)
    if reported.any():
        weight = np.exp(gap - gap.max())
        metrics |= {
            "sampling/sampling_logp_difference/mean": np.abs(gap).mean(),
            "sampling/sampling_logp_difference/max": np.abs(gap).max(),
            "sampling/effective_sample_size": weight.sum() ** 2 / (len(gap) * (weight**2).sum()),
        }
    k1 = record.logp_old.astype(np.float64) - record.logp_ref.astype(np.float64)
    sums = [sum(k1[a:b][trained[a:b]].tolist()) for a, b in row_spans(record)]
    penalized = record.reward - 0.1 * np.array(sums)
    if np.isfinite(penalized).any():
        metrics["reward/penalized"] = np.nanmean(penalized)
    known = k1[trained & ~np.isnan(k1)]
    return metrics | {
        "num_tokens": trained.sum(),
        "mean_k1": known.mean() if known.size else None,
    }


def assert_metrics_equal(record, *, by_sequence=False):
    found = all_metrics(record, by_sequence=by_sequence)
    expected = plain_metrics(record, by_sequence=by_sequence)
    others = ("completions/", "frac_reward", "advantage/")
    assert {n for n in found if not n.startswith(others)} >= set(expected)
    for name, value in expected.items():
        if value is not None and name.endswith(SUMS_IN_ANOTHER_ORDER):
            scale = 1.0 + record.num_tokens
            assert found[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE * scale)
        else:
            np.testing.assert_equal(found[name], value, name)


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any),
    masked=st.sampled_from([0.0, 0.3, 1.0]),
    holes=st.sampled_from([0.0, 0.2, 1.0]),
    same_logp=st.booleans(),
)
def test_metrics_of_any_record_are_the_plain_ones(seed, lengths, masked, holes, same_logp):
    record = random_record(seed, lengths, masked=masked, holes=holes, same_logp=same_logp)
    assert_metrics_equal(record)


@pytest.mark.parametrize("masked", [0.0, 0.3])
@pytest.mark.parametrize("holes", [0.0, 0.1])
def test_metrics_of_a_long_record_are_the_plain_ones(masked, holes):
    lengths = np.random.default_rng(1).integers(0, 700, 64)
    record = random_record(2, lengths, masked=masked, holes=holes)
    assert record.num_tokens > 16384
    assert_metrics_equal(record)


@pytest.mark.parametrize("holes", [0.0, 0.1])
def test_blocks_of_rows_have_the_metrics_of_all(monkeypatch, holes):
    record = random_record(5, [7, 0, 300, 2, 90, 64, 1, 128, 200], masked=0.2, holes=holes)
    expected = all_metrics(record) | clip_metrics(record, **CLIP, by_sequence=True)
    monkeypatch.setattr(trained_tokens, "BLOCK_TOKENS", 64)
    found = all_metrics(record) | clip_metrics(record, **CLIP, by_sequence=True)
    assert len(list(trained_tokens.trained_blocks(record))) == 8
    assert_metrics_close(found, expected)


def test_a_group_s_rewards_are_compared_with_one_another():
    reward = np.array([1.0, np.nan, 2.0, 1.0, 3.0, np.nan, np.inf, np.inf])
    record = replace(
        random_record(6, [2] * 8), reward=reward, group=np.array([0, 5, 1, 0, 1, 5, 7, 7])
    )
    # equal, without a number, different, infinite
    assert step_metrics(record)["frac_reward_zero_std"] == 0.25


def test_ratios_of_sequences_are_clipped_by_row():
    record = random_record(3, [5, 0, 7, 1], masked=0.3)
    found = clip_metrics(record, **CLIP, by_sequence=True)
    expected = plain_clipping(record, by_sequence=True)
    del expected["update_kl"]
    assert found == pytest.approx(expected, rel=1e-12)


def test_columns_of_a_record_are_never_changed():
    record = random_record(4, [5, 0, 7], masked=0.3, holes=0.2)
    copies = replace(record, logp_old=record.logp_old.copy(), logp_ref=record.logp_ref.copy())
    all_metrics(record)
    np.testing.assert_array_equal(record.logp_old, copies.logp_old)
    np.testing.assert_array_equal(record.logp_ref, copies.logp_ref)


def largest(values, num, block=1000):
    found = LargestValues(num)
    for first in range(0, len(values), block):
        found.add(values[first : first + block])
    return found.ascending()


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(8192),
        np.arange(16384.0),
        -np.arange(16384.0),
        np.random.default_rng(0).random(16384),
        np.where(np.arange(8192) % 100 == 3, np.inf, -np.inf),
    ],
    ids=["equal", "rising", "falling", "random", "infinite"],
)
@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.01, 0.5, 1.0])
def test_the_largest_values_are_the_end_of_the_sorted_ones(values, fraction):
    num = max(1, round(fraction * len(values)))
    np.testing.assert_array_equal(largest(values, num), np.sort(values)[-num:])


@given(
    hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-9, 9)),
    st.integers(1, 9),
    st.data(),
)
def test_the_largest_of_a_few_values(values, block, data):
    num = data.draw(st.integers(1, len(values)))
    np.testing.assert_array_equal(largest(values, num, block), np.sort(values)[-num:])
