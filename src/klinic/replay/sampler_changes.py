"""Replay a step with one change between sampler and learner, and measure the log-prob gap."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from klinic.checks import misaligned_logp, temperature_on_one_side
from klinic.checks.base import Case
from klinic.checks.measures import as_float64, equal_completions, logp_gap, num_equal_pairs, rms
from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import flatten_rollouts
from klinic.model.token_filters import TokenFilters, restrict_logp
from klinic.replay.recorded import rollouts_from_record
from klinic.replay.replay import BeforeAfter, Replay, concat_in_order


def _sampler_gap(record: StepRecord, logp: np.ndarray | None = None) -> float:
    """Return the gap between sampler and learner, or other log-probs of the learner."""
    record = record if logp is None else replace(record, logp_old=logp)
    return rms(logp_gap(record, "logp_sampler", "logp_old"))


def measure_older_weights(replay: Replay) -> BeforeAfter:
    """Score with the earlier weights that fit the tokens best."""
    record = replay.record
    before = _sampler_gap(record)
    return before, min(
        _sampler_gap(record, each.score_tokens(record)) for each in _older_replays(replay)
    )


def _older_replays(replay: Replay) -> Iterator[Replay]:
    """Yield the initial weights, then those before each repeated step."""
    older, at = replay.at_step(1), 1
    yield older
    for step in (step for step in replay.replayed if step > 1):
        if step == at + 1:
            older.repeat_step(at)
        else:  # the replay started from a checkpoint in between
            older = replay.at_step(step)
        at = step
        yield older


def measure_recorded_weights(replay: Replay) -> BeforeAfter:
    """Score with the weights of the version recorded with the tokens."""
    record = replay.record
    assert record.weight_version is not None  # noqa: S101 - the check needs it
    version = int(record.weight_version[record.loss_mask].min())
    steps = version // replay.recipe.learner.updates_per_batch
    older = replay.at_step(max(1, steps + 1))
    return _sampler_gap(record), _sampler_gap(record, older.score_tokens(record))


@torch.no_grad()
def measure_fitted_temperature(replay: Replay) -> BeforeAfter:
    """Score at the temperature fitted to the gap."""
    record, scorer = replay.record, replay.run.parts.policy.scorer
    columns = [c for c in ("logp_sampler", "logp_ref") if getattr(record, c) is not None]
    fits = {c: temperature_on_one_side.fit_gap_line(Case(record=record), c) for c in columns}
    valid_fits = {c: f for c, f in fits.items() if f is not None}
    side = max(valid_fits, key=lambda c: abs(valid_fits[c].slope))
    slope = valid_fits[side].slope
    before = rms(logp_gap(record, side, "logp_old"))
    near = scorer.temperature / (1 + slope)
    batches = replay.micro_batches(record)
    states = [(scorer.hidden(b.layout), b.layout.targets) for b in batches]
    gaps = []
    for factor in np.linspace(0.85, 1.15, 13):
        with replay.at_temperature(near * factor):
            logp = concat_in_order([scorer.score(*state).logp for state in states], batches)
        gaps.append(rms(logp_gap(replace(record, logp_old=logp), side, "logp_old")))
    return before, min(gaps)


def measure_shift(replay: Replay) -> BeforeAfter:
    """Shift the log-probs by the detected offset, in the affected rows."""
    record = replay.record
    scans = {
        c: misaligned_logp.scan_shifts(record, c)
        for c in ("logp_sampler", "logp_ref")
        if getattr(record, c) is not None
    }
    best = max(scans.values(), key=lambda scan: scan.gap - scan.shifted_gap)
    return best.gap, best.shifted_gap


def measure_surviving_rows(replay: Replay) -> BeforeAfter:
    """Drop the rows that do not survive decoding and encoding."""
    record = replay.record
    assert record.round_trip is not None  # noqa: S101 - the check needs it
    lost = np.repeat(~record.round_trip, np.diff(record.row_offsets))
    surviving = replace(record, loss_mask=record.loss_mask & ~lost)
    return _sampler_gap(record), _sampler_gap(surviving)


@torch.no_grad()
def measure_truncated_sampling(replay: Replay) -> BeforeAfter:
    """Score over fewer tokens: the top-p or top-k that fits best."""
    record, scorer = replay.record, replay.run.parts.policy.scorer
    candidates = [TokenFilters(top_p=float(p)) for p in np.arange(0.5, 1.0, 0.05)]
    candidates += [TokenFilters(top_k=k) for k in (1, 2, 3, 5, 10, 20, 50)]
    parts: list[list[Tensor]] = [[] for _ in candidates]
    batches = replay.micro_batches(record)
    for batch in batches:
        logp = scorer.log_softmax(scorer.head(scorer.hidden(batch.layout)))
        for part, filters in zip(parts, candidates, strict=True):
            fewer = restrict_logp(logp, filters)
            part.append(fewer.gather(-1, batch.layout.target_ids[:, None])[:, 0])
    gaps = []
    for part in parts:
        other = concat_in_order(part, batches)
        usable = np.where(np.isfinite(other), other, as_float64(record.logp_old))
        gaps.append(_sampler_gap(record, usable))
    return _sampler_gap(record), min(gaps)


def measure_declared_truncation(replay: Replay) -> BeforeAfter:
    """Score over the tokens that the recipe's truncation keeps, as the replayed learner does."""
    return _sampler_gap(replay.record), _sampler_gap(replay.record, replay.current_logp())


@torch.no_grad()
def measure_rows_alone(replay: Replay) -> BeforeAfter:
    """Score every row alone."""
    record = replay.record
    return _sampler_gap(record), _sampler_gap(record, replay.score_tokens(record, size=1))


def measure_separate_streams(replay: Replay) -> BeforeAfter:
    """Sample again with a separate RNG stream per completion: pairs of equal completions."""
    fresh = _sample_again(replay)
    fresh = replace(fresh, logp_old=fresh.logp_sampler)
    before, after = (num_equal_pairs(equal_completions(r)) for r in (replay.record, fresh))
    return float(before), float(after)


def measure_loaded_weights(replay: Replay) -> BeforeAfter:
    """Load the policy's weights into the sampler, and sample the step's prompts again."""
    fresh = _sample_again(replay)
    with torch.no_grad():
        after = _sampler_gap(fresh, replay.score_tokens(fresh))
    return _sampler_gap(replay.record), after


def _sample_again(replay: Replay) -> StepRecord:
    """Return new completions of the step's prompts, from the replayed policy."""
    replay.run.sampler.load(replay.learner.publish())
    prompts = list({r.prompt.index: r.prompt for r in rollouts_from_record(replay.record)}.values())
    groups = list(replay.run.sampler.sample(prompts, step=replay.record.step))
    return flatten_rollouts(
        [rollout for group in groups for rollout in group], step=replay.record.step
    )
