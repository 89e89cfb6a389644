"""Replay a step with one change between sampler and learner, and measure the log-prob gap."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from klinic.checks import misaligned_logp, temperature_on_one_side
from klinic.checks.base import Case
from klinic.checks.measures import equal_completions, gap, num_equal_pairs, rms, wide
from klinic.evidence.record import StepRecord
from klinic.evidence.rollout import flatten
from klinic.probe.proof import Measured
from klinic.probe.recorded import rollouts_of
from klinic.probe.replay import Replay, in_order
from klinic.sampler.drawing import Drawing, kept


def _sampler_gap(record: StepRecord, logp: np.ndarray | None = None) -> float:
    """Return the gap between sampler and learner, or other log-probs of the learner."""
    record = record if logp is None else replace(record, logp_old=logp)
    return rms(gap(record, "logp_sampler", "logp_old"))


def first_weights(replay: Replay) -> Measured:
    """Score with the earlier weights that fit the tokens best."""
    record = replay.record
    before = _sampler_gap(record)
    return before, min(_sampler_gap(record, each.score_other(record)) for each in _older(replay))


def _older(replay: Replay) -> Iterator[Replay]:
    """Yield the initial weights, then those before each repeated step."""
    older, at = replay.at(1), 1
    yield older
    for step in (step for step in replay.replayed if step > 1):
        if step == at + 1:
            older.make_again(at)
        else:  # the replay started from a checkpoint in between
            older = replay.at(step)
        at = step
        yield older


def own_weights(replay: Replay) -> Measured:
    """Score with the weights of the version recorded with the tokens."""
    record = replay.record
    assert record.weight_version is not None  # noqa: S101 - the check needs it
    version = int(record.weight_version[record.loss_mask].min())
    steps = version // replay.recipe.learner.updates_per_batch
    older = replay.at(max(1, steps + 1))
    return _sampler_gap(record), _sampler_gap(record, older.score_other(record))


@torch.no_grad()
def fitted_temperature(replay: Replay) -> Measured:
    """Score at the temperature fitted to the gap."""
    record, scorer = replay.record, replay.run.policy.scorer
    columns = [c for c in ("logp_sampler", "logp_ref") if getattr(record, c) is not None]
    fits = {c: temperature_on_one_side.fit(Case(record=record), c) for c in columns}
    known = {c: f for c, f in fits.items() if f is not None}
    side = max(known, key=lambda c: abs(known[c].slope))
    slope = known[side].slope
    before = rms(gap(record, side, "logp_old"))
    near = scorer.temperature / (1 + slope)
    batches = replay.batches(record)
    states = [(scorer.hidden(b.layout), b.layout.target_ids) for b in batches]
    tried = []
    for factor in np.linspace(0.85, 1.15, 13):
        with replay.temperature(near * factor):
            logp = in_order([scorer.score(*state).logp for state in states], batches)
        tried.append(rms(gap(replace(record, logp_old=logp), side, "logp_old")))
    return before, min(tried)


def found_shift(replay: Replay) -> Measured:
    """Shift the log-probs by the detected offset, in the affected rows."""
    record = replay.record
    found = {
        c: misaligned_logp.scan(record, c)
        for c in ("logp_sampler", "logp_ref")
        if getattr(record, c) is not None
    }
    best = max(found.values(), key=lambda scan: scan.gap - scan.shifted)
    return best.gap, best.shifted


def surviving_rows(replay: Replay) -> Measured:
    """Drop the rows that do not survive decoding and encoding."""
    record = replay.record
    assert record.round_trip is not None  # noqa: S101 - the check needs it
    lost = np.repeat(~record.round_trip, np.diff(record.row_offsets))
    kept_rows = replace(record, loss_mask=record.loss_mask & ~lost)
    return _sampler_gap(record), _sampler_gap(kept_rows)


@torch.no_grad()
def narrowed(replay: Replay) -> Measured:
    """Score over fewer tokens: the top-p or top-k that fits best."""
    record, scorer = replay.record, replay.run.policy.scorer
    tried = [Drawing(top_p=float(p)) for p in np.arange(0.5, 1.0, 0.05)]
    tried += [Drawing(top_k=k) for k in (1, 2, 3, 5, 10, 20, 50)]
    parts: list[list[Tensor]] = [[] for _ in tried]
    batches = replay.batches(record)
    for batch in batches:
        logp = scorer.log_softmax(scorer.head(scorer.hidden(batch.layout)))
        for part, how in zip(parts, tried, strict=True):
            fewer = torch.log_softmax(logp.masked_fill(~kept(logp, how), -torch.inf), -1)
            part.append(fewer.gather(-1, batch.layout.target_ids[:, None])[:, 0])
    found = []
    for part in parts:
        other = in_order(part, batches)
        usable = np.where(np.isfinite(other), other, wide(record.logp_old))
        found.append(_sampler_gap(record, usable))
    return _sampler_gap(record), min(found)


@torch.no_grad()
def rows_alone(replay: Replay) -> Measured:
    """Score every row alone."""
    record = replay.record
    return _sampler_gap(record), _sampler_gap(record, replay.score_other(record, size=1))


def streams_of_their_own(replay: Replay) -> Measured:
    """Sample again with a separate RNG stream per completion: pairs of equal completions."""
    replay.run.sampler.load(replay.learner.publish())
    prompts = list({r.prompt.index: r.prompt for r in rollouts_of(replay.record)}.values())
    groups = list(replay.run.sampler.sample(prompts, step=replay.record.step))
    fresh = flatten([rollout for group in groups for rollout in group], step=replay.record.step)
    fresh = replace(fresh, logp_old=fresh.logp_sampler)
    before, after = (num_equal_pairs(equal_completions(r)) for r in (replay.record, fresh))
    return float(before), float(after)
