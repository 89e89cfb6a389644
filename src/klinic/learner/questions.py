"""Active probes: measurements on the live learner that its records cannot provide.

Probes leave weights, gradients and RNG state unchanged. Each runs on a few completions of the step
and compares sampled gradient entries, so it is affordable for a model of any size. Checks interpret
the results.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klinic.evidence.record import StepRecord
from klinic.evidence.rows import some_rows
from klinic.learner.comparing import Answer, apart, compared, cosine, is_kept, norm, sampled_entries
from klinic.learner.objective import Objective, Targets, kl_inputs
from klinic.learner.packing import MicroBatch, joined
from klinic.learner.team import Team
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.maths.kl_inputs import RATIO_CAP
from klinic.model.adapters import is_adapted
from klinic.model.reference import Reference
from klinic.model.scorer import TokenScorer

ROWS = 16  # completions that are probed
ALONE = 4  # of them that are scored one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The parts of a learner that the probes use."""

    lm: Any
    scorer: TokenScorer
    reference: Reference | None
    objective: Objective
    size: int
    """Completions per micro-batch."""
    team: Team
    cut: Callable[[StepRecord, int], list[MicroBatch]]
    """Splits this rank's completions into micro-batches of a given size."""
    gradients: Callable[[], list[Tensor]]
    score: Callable[..., Any]
    prepare: Callable[..., Any]
    discard: Callable[[], None]


def ask(learner: Asked, record: StepRecord, *, kl_coef: float) -> dict[str, Answer]:
    """Run every probe that applies to this learner; return the results by name."""
    with_kl = kl_coef > 0 and learner.reference is not None
    scored = learner.score(record, needs_reference=with_kl)
    logp = _logp(learner, record, scored.batches)
    answers = {
        "rescore": apart(logp, _logp(learner, record, scored.batches)),
        "rescore_alone": alone(learner, record, logp),
    }
    # a second scorer would not gather the shards
    if learner.scorer.autocast is not None and learner.team.size == 1:
        answers["rescore_float32"] = float32(learner, scored, logp)
    if is_adapted(learner.lm) and with_kl:
        answers["adapters_off"] = adapters_off(learner, scored, logp)
    if with_kl and learner.objective.estimator in PROMISED:
        answers["kl_gradient"] = kl_gradient(learner, scored)
    if record.num_rows > 1:
        answers["micro_batches"] = halved(learner, scored, kl_coef)
    learner.discard()
    return answers


def alone(learner: Asked, record: StepRecord, together: Tensor) -> Answer:
    """Score some rows one by one, unpadded; half of them are the farthest from the sampler."""
    few = sorted(_suspects(record, together.cpu().numpy()))
    rows = some_rows(record, few)
    one_by_one = _logp(learner, rows, learner.cut(rows, 1))
    ends = record.row_offsets
    return apart(one_by_one, torch.cat([together[ends[row] : ends[row + 1]] for row in few]))


def float32(learner: Asked, scored: Any, logp: Tensor) -> Answer:
    """Score without the recipe's lower precision."""
    plain = replace(learner, scorer=TokenScorer(learner.lm, temperature=learner.scorer.temperature))
    return apart(logp, _logp(plain, scored.record, scored.batches))


@torch.no_grad()
def adapters_off(learner: Asked, scored: Any, policy: Tensor) -> Answer:
    """Compare the policy without its adapter, the policy, and the reference."""
    reference: Tensor = scored.targets.logp_ref
    with learner.lm.disable_adapter():
        off = _logp(learner, scored.record, scored.batches)
    return {
        "off_to_reference": float((off - reference).abs().mean()),
        "off_to_policy": float((off - policy).abs().mean()),
        "policy_to_reference": float((policy - reference).abs().mean()),
    }


def kl_gradient(learner: Asked, scored: Any) -> Answer:
    """Compare the KL term's part of the real gradient with the formula of its estimator.

    The real part is the gradient with a coefficient of 1 minus that with 0, both without rewards.
    Other estimators are tried only where the gradient differs from its formula.
    """
    name = learner.objective.estimator
    assert name is not None  # noqa: S101 - runs only with a KL term
    found = _prepared(learner, scored, kl_coef=1.0, reward_scale=0.0)
    promised = _promised(learner, scored, name)
    if is_kept(found, promised):
        return {**compared(found, promised), "score_norm": None, "looks_like": name}
    found = found - _prepared(learner, scored, kl_coef=0.0, reward_scale=0.0)
    others = {key: _promised(learner, scored, key) for key in LIKELY if key != name}
    alike = {key: abs(cosine(found, v)) for key, v in {name: promised, **others}.items()}
    return {
        **compared(found, promised),
        "score_norm": norm(promised if name == "k1" else others["k1"]),
        "looks_like": max(alike, key=lambda key: alike[key]),
    }


def halved(learner: Asked, scored: Any, kl_coef: float) -> Answer:
    """Compare the gradient with that of micro-batches of half the size."""
    whole = _prepared(learner, scored, kl_coef=kl_coef)
    record: StepRecord = scored.record
    batches = learner.cut(record, max(1, min(learner.size, record.num_rows) // 2))
    parts = replace(scored, batches=batches, ref_hidden=[None] * len(batches))
    return compared(_prepared(learner, parts, kl_coef=kl_coef), whole)


def _weights(targets: Targets, logp: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield d(term)/d(logp) for each estimator."""
    assert targets.logp_ref is not None  # noqa: S101 - runs only with a reference
    d = (logp - targets.logp_ref).detach()
    ratio = torch.ones_like(d)
    if targets.logp_sampler is not None:
        ratio = (logp.detach() - targets.logp_sampler).exp().clamp(max=RATIO_CAP).nan_to_num(1.0)
    yield "unbiased", ratio * d
    yield "k1", torch.ones_like(d)
    yield "k2", d
    yield "k3", -torch.expm1(-d)
    yield "k3_plus", d


LIKELY = ("unbiased", "k1", "k3")
"""The estimators that a wrong KL term most often turns out to be."""
WRITTEN = ("unbiased", "k1", "k2", "k3", "k3_plus", "exact", "topk")
"""Estimators whose gradient is implemented here again, independent of the training code."""
PROMISED = (*WRITTEN, *(name for name in ESTIMATORS if name not in (*WRITTEN, "sequence")))
"""Those, and estimators evaluated by the formula in `maths`, bypassing the learner's loss."""


def _promised(learner: Asked, scored: Any, name: str) -> Tensor:
    learner.discard()
    for batch in scored.batches:
        targets = scored.targets.cut(batch)
        if name in ("exact", "topk"):
            assert learner.reference is not None  # noqa: S101 - runs only with a reference
            states = replace(learner.reference.hidden(batch.layout), topk=name == "topk")
            scores = learner.scorer(batch.layout, states)
            terms = scores.kl_exact if name == "exact" else scores.kl_topk
        elif name in WRITTEN:
            logp = learner.scorer(batch.layout).logp
            terms = dict(_weights(targets, logp))[name] * logp
        else:
            inputs = kl_inputs(learner.scorer(batch.layout), targets, vocabulary=False)
            terms = ESTIMATORS[name].term(inputs.clean())
        inside = torch.where(targets.loss_mask, targets.kl_weight * terms, 0.0)
        torch.autograd.backward(inside.sum())
    return _sample(learner)


def _prepared(learner: Asked, scored: Any, **how: float) -> Tensor:
    learner.prepare(scored, **how)
    return _sample(learner)


def _sample(learner: Asked) -> Tensor:
    """Return evenly spaced entries of every gradient, concatenated, and drop the gradients."""
    entries = sampled_entries(learner.gradients())
    learner.discard()
    return entries


@torch.no_grad()
def _logp(learner: Asked, record: StepRecord, batches: list[MicroBatch]) -> Tensor:
    logp = [learner.scorer(batch.layout).logp for batch in batches]
    return joined(logp, batches, record.num_tokens, learner.team)


def _suspects(record: StepRecord, logp: np.ndarray) -> set[int]:
    """Return the rows that differ most from the sampler's log-probs, and some spaced evenly."""
    spread = np.linspace(0, record.num_rows - 1, ALONE // 2).astype(int).tolist()
    if record.logp_sampler is None:
        return set(spread)
    apart = np.nan_to_num(np.abs(logp - record.logp_sampler))
    ends = np.concatenate([[0.0], np.cumsum(apart)])[record.row_offsets]
    return {*spread, *np.argsort(-np.diff(ends))[: ALONE // 2].tolist()}
