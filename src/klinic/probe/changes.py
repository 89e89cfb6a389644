"""The one thing to change for each cause, and the quantity that shows it.

Not every cause has one: a prompt that was lost on the way is not in the record, a reward that can
be exploited has no single right form, and prompts that are too hard stay so in a replay.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from klinic.checks import misaligned_logp, temperature_on_one_side
from klinic.checks.base import Case
from klinic.checks.broken_sampler import equal_pairs
from klinic.checks.measures import gap, rms, wide
from klinic.evidence.metrics import kl_metrics, update_kl
from klinic.evidence.record import EmittedBy, StepRecord
from klinic.evidence.rollout import Prompt, Rollout, Segment, flatten
from klinic.loop.asking import regrade
from klinic.maths.advantage import ADVANTAGES
from klinic.probe.proof import Change, much_smaller
from klinic.probe.replay import Replay
from klinic.sampler.drawing import Drawing, kept

Measured = tuple[float, float]


def _sampler_gap(record: StepRecord, logp: np.ndarray | None = None) -> float:
    """Return how far the sampler is from the learner, or from other log-probs of the learner."""
    record = record if logp is None else replace(record, logp_old=logp)
    return rms(gap(record, "logp_sampler", "logp_old"))


def first_weights(replay: Replay) -> Measured:
    """Score with the weights that the tokens fit best, of those before the step."""
    record = replay.record
    before = _sampler_gap(record)
    older = [Replay(replay.folder, step) for step in (1, *replay.replayed)]
    return before, min(_sampler_gap(record, each.score_other(record)) for each in older)


def own_weights(replay: Replay) -> Measured:
    """Score with the weights that the tokens say they were drawn from."""
    record = replay.record
    assert record.weight_version is not None  # noqa: S101 - named by it
    version = int(record.weight_version[record.loss_mask].min())
    steps = version // replay.recipe.learner.updates_per_batch
    older = Replay(replay.folder, max(1, steps + 1))
    return _sampler_gap(record), _sampler_gap(record, older.score_other(record))


def fitted_temperature(replay: Replay) -> Measured:
    """Score at the temperature that the gap's line says."""
    record, scorer = replay.record, replay.run.policy.scorer
    columns = [c for c in ("logp_sampler", "logp_ref") if getattr(record, c) is not None]
    fits = {c: temperature_on_one_side.fit(Case(record=record), c) for c in columns}
    known = {c: f for c, f in fits.items() if f is not None}
    side = max(known, key=lambda c: abs(known[c].slope))
    slope = known[side].slope
    before = rms(gap(record, side, "logp_old"))
    near = scorer.temperature / (1 + slope)
    tried = []
    for factor in np.linspace(0.85, 1.15, 13):
        with replay.temperature(near * factor):
            tried.append(rms(gap(replace(record, logp_old=replay.logp()), side, "logp_old")))
    return before, min(tried)


def start_as_reference(replay: Replay) -> Measured:
    """Take the policy as it starts for the reference."""
    return rms(gap(replay.record, "logp_old", "logp_ref")), rms(
        gap(replay.scored_record(), "logp_old", "logp_ref")
    )


def found_shift(replay: Replay) -> Measured:
    """Shift the log-probs by what the scan found, in the rows that it hit."""
    record = replay.record
    found = {
        c: misaligned_logp.scan(record, c)
        for c in ("logp_sampler", "logp_ref")
        if getattr(record, c) is not None
    }
    best = max(found.values(), key=lambda scan: scan.gap - scan.shifted)
    return best.gap, best.shifted


def surviving_rows(replay: Replay) -> Measured:
    """Leave out the rows that do not survive decoding and encoding."""
    record = replay.record
    assert record.round_trip is not None  # noqa: S101 - named by it
    lost = np.repeat(~record.round_trip, np.diff(record.row_offsets))
    kept_rows = replace(record, loss_mask=record.loss_mask & ~lost)
    return _sampler_gap(record), _sampler_gap(kept_rows)


def emitted_mask(replay: Replay) -> Measured:
    """Train on exactly what the policy emitted: the share of its tokens that the mask has wrong."""
    record = replay.record
    assert record.emitted_by is not None  # noqa: S101 - named by it
    own = record.emitted_by == EmittedBy.POLICY
    again = flatten(_rollouts(record), step=record.step)
    return (
        float((own != record.loss_mask).mean()),
        float((own != again.loss_mask).mean()),
    )


def right_gradient(replay: Replay) -> Measured:
    """Let the KL term be what its name promises."""
    return _off(replay.told("kl_gradient")), _off(replay.probe()["kl_gradient"])


def _off(answer: Mapping[str, Any]) -> float:
    """Return how far a gradient is from the one that was promised, over that of the score."""
    found, promised = float(answer["norm"] or 0), float(answer["expected_norm"] or 0)
    along = found * promised * float(answer["cosine"] or 0)
    square = max(found**2 + promised**2 - 2 * along, 0.0)
    return float(np.sqrt(square)) / max(float(answer["score_norm"] or 0), 1e-300)


def cut_otherwise(replay: Replay) -> Measured:
    """Divide by the tokens of the whole step."""
    told = replay.told("micro_batches")
    return float(told.get("ratio") or 0.0), float(replay.probe()["micro_batches"]["ratio"] or 0.0)


def linear_tails(replay: Replay) -> Measured:
    """Use an estimator with linear tails on the very same batch."""
    learner = replay.learner
    scored = replay.score(replay.record)
    ref = torch.from_numpy(wide(replay.record.logp_ref)).to(scored.targets.advantage)
    scored = replace(scored, targets=replace(scored.targets, logp_ref=ref))
    norms = []
    for name in (replay.recipe.kl.estimator if replay.recipe.kl else "k3", "unbiased"):
        learner._objective = replace(learner._objective, estimator=name)
        prepared = learner.prepare(scored, kl_coef=replay.kl_coef)
        norms.append(float(prepared.metrics["grad_norm"]))
    return norms[0], norms[1]


def chosen_not_multiplied(replay: Replay) -> Measured:
    """Leave out what is masked, instead of multiplying it by 0: 1 where the loss is a number."""
    told = replay.record.facts.get("loss")
    scored = replay.score(replay.record)
    prepared = replay.learner.prepare(scored, kl_coef=replay.kl_coef)
    return float(told is not None and np.isfinite(float(told))), float(prepared.finite)


@torch.no_grad()
def narrowed(replay: Replay) -> Measured:
    """Score among fewer outcomes: the top-p or top-k that fits best."""
    record, scorer = replay.record, replay.run.policy.scorer
    tried = [Drawing(top_p=p) for p in np.arange(0.5, 1.0, 0.05)]
    tried += [Drawing(top_k=k) for k in (1, 2, 3, 5, 10, 20, 50)]
    batches = replay.score(record).batches
    found = []
    for how in tried:
        parts = []
        for batch in batches:
            logp = scorer.log_softmax(scorer.head(scorer.hidden(batch.layout)))
            logp = torch.log_softmax(logp.masked_fill(~kept(logp, how), -torch.inf), -1)
            parts.append(logp.gather(-1, batch.layout.target_ids[:, None])[:, 0])
        other = torch.cat(parts).double().cpu().numpy()
        usable = np.where(np.isfinite(other), other, wide(record.logp_old))
        found.append(_sampler_gap(record, usable))
    return _sampler_gap(record), min(found)


def own_advantages(replay: Replay) -> Measured:
    """Compute advantages as the recipe names them, within groups: the largest, over its bound."""
    record = replay.record
    assert record.reward is not None and record.advantage is not None  # noqa: S101, PT018
    again = ADVANTAGES[replay.recipe.learner.advantage](record.reward, record.group)
    return _worst(record, record.advantage), _worst(record, again)


def _worst(record: StepRecord, advantage: np.ndarray) -> float:
    """Return the farthest that a group's advantages are from a sum of 0, or from their bound."""
    sums = np.abs(np.bincount(record.group, weights=np.nan_to_num(advantage)))
    sizes = np.bincount(record.group, weights=np.abs(np.nan_to_num(advantage)))
    bound = np.sqrt(np.maximum(np.bincount(record.group)[record.group] - 1, 1))
    over = float(np.max(np.abs(np.nan_to_num(advantage)) / bound))
    return max(float(np.max(sums / np.maximum(sizes, 1e-12))), over - 1.0, 0.0)


def no_dropout(replay: Replay) -> Measured:
    """Score without any dropout."""
    return float(replay.told("rescore").get("largest") or 0.0), float(
        replay.probe()["rescore"]["largest"] or 0.0
    )


@torch.no_grad()
def rows_alone(replay: Replay) -> Measured:
    """Score every row alone."""
    record = replay.record
    return _sampler_gap(record), _sampler_gap(record, replay.score_other(record, size=1))


def smaller_rate(replay: Replay) -> Measured:
    """Make the update before the step at a tenth of its rate: KL(new || old)."""
    folder, step = replay.folder, replay.record.step
    moved = []
    for factor in (_rate_factor(replay), 0.1 * _rate_factor(replay)):
        again = Replay(folder, max(1, step - 1))
        before = again.scored_record()
        again.update(again.record, lr_factor=factor)
        moved.append(update_kl(replace(before, logp=again.score_other(again.record))))
    return moved[0], moved[1]


def _rate_factor(replay: Replay) -> float:
    """Return how many times the recipe's rate the run really used."""
    used = replay.record.facts.get("learning_rate")
    planned = replay.recipe.learner.learning_rate
    return 1.0 if used is None else float(used) / planned


def full_precision(replay: Replay) -> Measured:
    """Make the update in fp32, at the rate of the recipe: the share of weights that stay."""
    told = replay.record.facts.get("unchanged_share")
    replay.learner._look = True
    metrics = replay.update(replay.record)
    return float(1.0 if told is None else told), float(metrics.get("unchanged_share", 0.0))


def regraded(replay: Replay) -> Measured:
    """Grade the very same completions again: the share of rewards that are theirs."""
    record, task = replay.record, replay.run.source.task
    rollouts = _decoded(replay)
    again = replay.run.reward(rollouts).total
    first = wide(record.reward)
    same = float(np.isclose(again, first, equal_nan=True).mean())
    graded = replace(record, reward=again)
    if task is None:
        return same, 1.0
    return same, regrade(task, rollouts, graded, replay.run.reward)["same"]


def streams_of_their_own(replay: Replay) -> Measured:
    """Sample again, every completion from a stream of its own: pairs of equal completions."""
    replay.run.sampler.load(replay.learner.publish())
    prompts = list({r.prompt.index: r.prompt for r in _rollouts(replay.record)}.values())
    groups = list(replay.run.sampler.sample(prompts, step=replay.record.step))
    fresh = flatten([rollout for group in groups for rollout in group], step=replay.record.step)
    fresh = replace(fresh, logp_old=fresh.logp_sampler)
    return float(equal_pairs(replay.record)[0]), float(equal_pairs(fresh)[0])


def told_again(replay: Replay) -> Measured:
    """Compute the KL from the record: how far what was told is off."""
    computed = kl_metrics(replay.record)["kl"]
    told = replay.metric("kl")
    return abs(told - computed) / max(abs(computed), 1e-12), 0.0


def _rollouts(record: StepRecord) -> list[Rollout]:
    """Return the completions of a record as they were sampled."""
    assert record.prompt_ids is not None and record.prompt_offsets is not None  # noqa: S101, PT018
    prompts = np.split(record.prompt_ids, record.prompt_offsets[1:-1])
    rows = np.split(record.token_ids, record.row_offsets[1:-1])
    found = []
    for row, (prompt, ids) in enumerate(zip(prompts, rows, strict=True)):
        index = int(record.group[row] if record.prompt_index is None else record.prompt_index[row])
        segment = Segment(
            token_ids=ids, emitted_by=EmittedBy.POLICY, logp_sampler=None, weight_version=0
        )
        found.append(
            Rollout(
                prompt=Prompt(index=index, text="", token_ids=prompt, columns={}),
                sample=row,
                segments=(segment,),
                finish_reason="stop",
                text="",
            )
        )
    return found


def _decoded(replay: Replay) -> list[Rollout]:
    """Return the completions with texts, and prompts with the columns of their rows."""
    tokenizer = replay.run.policy.tokenizer
    found = []
    for rollout in _rollouts(replay.record):
        prompt = replay.run.data.prompt(rollout.prompt.index)
        text = tokenizer.decode(rollout.token_ids.tolist(), skip_special_tokens=True)
        found.append(replace(rollout, prompt=prompt, text=text))
    return found


def _was_off(before: float, after: float) -> bool:
    return abs(before - 1) > 0.05 and abs(after - 1) < 0.05


CHANGES: dict[str, Change] = {
    "stale-sampler": Change(
        changed="score with older weights",
        quantity="gap to the sampler, nats",
        measure=first_weights,
        holds=much_smaller,
    ),
    "temperature-on-one-side": Change(
        changed="the temperature",
        quantity="gap, nats",
        measure=fitted_temperature,
        holds=much_smaller,
    ),
    "wrong-reference": Change(
        changed="the reference is the start",
        quantity="gap to the reference, nats",
        measure=start_as_reference,
        holds=much_smaller,
    ),
    "misaligned-logp": Change(
        changed="log-probs shifted",
        quantity="gap in the rows that are hit, nats",
        measure=found_shift,
        holds=much_smaller,
    ),
    "retokenised": Change(
        changed="without rows that do not survive",
        quantity="gap to the sampler, nats",
        measure=surviving_rows,
        holds=much_smaller,
    ),
    "wrong-loss-mask": Change(
        changed="the mask from who emitted a token",
        quantity="share of tokens that are masked wrongly",
        measure=emitted_mask,
        holds=much_smaller,
    ),
    "stop-token-fault": Change(
        changed="the mask from who emitted a token",
        quantity="share of tokens that are masked wrongly",
        measure=emitted_mask,
        holds=much_smaller,
    ),
    "kl-gradient-wrong": Change(
        changed="the KL term as its name promises",
        quantity="distance from the promised gradient, over the score's",
        measure=right_gradient,
        holds=much_smaller,
    ),
    "kl-not-applied": Change(
        changed="the KL term as its name promises",
        quantity="distance from the promised gradient, over the score's",
        measure=right_gradient,
        holds=much_smaller,
    ),
    "kl-sign-flipped": Change(
        changed="the KL term as its name promises",
        quantity="distance from the promised gradient, over the score's",
        measure=right_gradient,
        holds=much_smaller,
    ),
    "kl-tail-dominates": Change(
        changed="kl.estimator unbiased",
        quantity="gradient norm",
        measure=linear_tails,
        holds=much_smaller,
    ),
    "nan-outside-mask": Change(
        changed="masked tokens are left out, not multiplied",
        quantity="whether the loss is a number",
        measure=chosen_not_multiplied,
        holds=lambda before, after: before == 0 and after == 1,
    ),
    "hidden-sampling-transform": Change(
        changed="fewer outcomes",
        quantity="gap to the sampler, nats",
        measure=narrowed,
        holds=much_smaller,
    ),
    "advantage-explodes": Change(
        changed="advantages as the recipe names them",
        quantity="how far a group is from its bound",
        measure=own_advantages,
        holds=much_smaller,
    ),
    "wrong-groups": Change(
        changed="advantages within groups",
        quantity="how far a group is from a sum of 0",
        measure=own_advantages,
        holds=much_smaller,
    ),
    "loss-scaled-wrong": Change(
        changed="divided by the tokens of the whole step",
        quantity="gradient in halves, times the whole",
        measure=cut_otherwise,
        holds=_was_off,
    ),
    "dropout-in-scoring": Change(
        changed="no dropout",
        quantity="scored twice, nats at most",
        measure=no_dropout,
        holds=much_smaller,
    ),
    "layout-changes-logp": Change(
        changed="every row alone",
        quantity="gap to the sampler, nats",
        measure=rows_alone,
        holds=much_smaller,
    ),
    "step-too-big": Change(
        changed="a tenth of the rate",
        quantity="KL(new || old) of the update before, nats per token",
        measure=smaller_rate,
        holds=much_smaller,
    ),
    "policy-does-not-move": Change(
        changed="the update in fp32",
        quantity="share of the weights that stay",
        measure=full_precision,
        holds=lambda before, after: before > 0.9 > after,
    ),
    "broken-reward": Change(
        changed="completions graded again",
        quantity="share with the reward that is theirs",
        measure=regraded,
        holds=lambda before, after: before < 0.9 < after,
    ),
    "moved-reference": Change(
        changed="the reference is the start",
        quantity="gap to the reference, nats",
        measure=start_as_reference,
        holds=lambda before, after: abs(after) > 5 * abs(before) or abs(after - before) > 1e-3,
    ),
    "samples-too-old": Change(
        changed="score with the weights that the tokens name",
        quantity="gap to the sampler, nats",
        measure=own_weights,
        holds=much_smaller,
    ),
    "broken-sampler": Change(
        changed="streams of their own",
        quantity="pairs of equal completions",
        measure=streams_of_their_own,
        holds=lambda before, after: after < before / 2,
    ),
    "wrong-metric": Change(
        changed="computed from the record",
        quantity="share by which kl is off",
        measure=told_again,
        holds=much_smaller,
    ),
}
"""By cause."""
