"""Active probes: measurements on the live learner that its records cannot provide.

Probes leave weights, gradients and RNG state unchanged. Each runs on a few completions of the step
and compares sampled gradient entries, so it is affordable for a model of any size. Checks interpret
the results.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from klinic.evidence.record import ProbeResult, StepRecord, select_rows
from klinic.learner.objective import LossTargets, Objective, kl_inputs
from klinic.learner.packing import MicroBatch, gather_tokens
from klinic.learner.process_group import ProcessGroup
from klinic.learner.protocol import LossScales, PreparedUpdate
from klinic.learner.scored_batch import ScoredBatch
from klinic.learner.settings import LearnerSettings
from klinic.maths.importance import ImportanceSampling
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.model.adapters import has_adapter
from klinic.model.attention import fp32_attention
from klinic.model.loading import Policy
from klinic.model.reference import Reference
from klinic.model.scorer import RefHidden, TokenScorer
from klinic.model.weights import full_tensor

GRADIENT_TOLERANCE = 0.01  # relative tolerance of a gradient: bf16 rounding reaches it
NUM_COMPARED = 4096  # compared gradient entries per tensor


def sampled_entries(gradients: Iterable[Tensor]) -> Tensor:
    """Return evenly spaced entries of every gradient, concatenated."""
    parts = [full_tensor(g.detach()).reshape(-1) for g in gradients]
    flat = [p[:: max(1, p.numel() // NUM_COMPARED)].double() for p in parts]
    return torch.cat(flat) if flat else torch.zeros(1, dtype=torch.float64)


def is_expected_gradient(gradient: Tensor, expected: Tensor) -> bool:
    """Whether a gradient equals the expected one up to rounding."""
    gradient, expected = pad_to_same_length(gradient, expected)
    return vector_norm(gradient - expected) <= GRADIENT_TOLERANCE * max(
        vector_norm(expected), vector_norm(gradient)
    )


def compare_gradients(gradient: Tensor, expected: Tensor) -> ProbeResult:
    """Return norm and direction of a gradient relative to the expected one."""
    gradient, expected = pad_to_same_length(gradient, expected)
    square = float((expected * expected).sum())
    return {
        "ratio": float((gradient * expected).sum()) / square if square else None,
        "cosine": cosine_similarity(gradient, expected) if square else None,
        "norm": vector_norm(gradient),
        "expected_norm": vector_norm(expected),
    }


def pad_to_same_length(gradient: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Pad both to the same length: a gradient that was cut off has no entries."""
    length = max(len(gradient), len(expected))
    grown = [torch.nn.functional.pad(v, (0, length - len(v))) for v in (gradient, expected)]
    return grown[0], grown[1]


def cosine_similarity(one: Tensor, other: Tensor) -> float:
    """Return the cosine between two gradients."""
    one, other = pad_to_same_length(one, other)
    return float((one * other).sum()) / max(vector_norm(one) * vector_norm(other), 1e-300)


def vector_norm(vector: Tensor) -> float:
    """Return the Euclidean norm of a gradient."""
    return float(vector.norm())


def logp_difference(one: Tensor, other: Tensor) -> ProbeResult:
    """Return the largest and mean difference of two scorings, in nats."""
    difference = (one - other).abs()
    return {"largest": float(difference.max()), "mean": float(difference.mean())}


NUM_PROBED_ROWS = 16  # completions that are probed
NUM_ROWS_ALONE = 4  # of them that are scored one by one
NO_TERMS = LossScales(kl_coef=0.0, reward=0.0, teacher=0.0)


@runtime_checkable
class ProbedLearner(Protocol):
    """The members of a learner that the probes use."""

    policy: Policy
    scorer: TokenScorer
    reference: Reference | None
    teacher: Reference | None
    objective: Objective
    settings: LearnerSettings
    group: ProcessGroup

    def make_micro_batches(self, record: StepRecord, size: int) -> list[MicroBatch]:
        """Split this rank's rows into micro-batches of at most `size` rows of the longest."""

    def score(self, record: StepRecord, *, needs_reference: bool) -> ScoredBatch:
        """Score a batch with policy and reference."""

    def prepare(self, scored: ScoredBatch, scales: LossScales) -> PreparedUpdate:
        """Compute the loss and its gradient."""

    def current_gradients(self) -> list[Tensor]:
        """Return the prepared gradients of the trained tensors."""

    def discard(self) -> None:
        """Drop the prepared gradient."""


def run_probes(
    learner: ProbedLearner, record: StepRecord, *, kl_coef: float
) -> dict[str, ProbeResult]:
    """Run every probe that applies to this learner; return the results by name."""
    with_kl = kl_coef > 0 and learner.reference is not None
    scored = learner.score(record, needs_reference=with_kl)
    logp = _score_batches(learner, record, scored.batches)
    results = {
        "rescore": logp_difference(logp, _score_batches(learner, record, scored.batches)),
        "rescore_alone": probe_rows_alone(learner, record, logp),
    }
    # a second scorer would not gather the shards
    if learner.scorer.autocast is not None and learner.group.size == 1:
        results["rescore_float32"] = probe_float32(learner, scored, logp)
    if has_adapter(learner.policy.lm) and with_kl:
        results["adapters_off"] = probe_adapters_off(learner, scored, logp)
    if with_kl and learner.objective.estimator in PROBED_ESTIMATORS:
        results["kl_gradient"] = probe_kl_gradient(learner, scored)
    if learner.teacher is not None and learner.objective.teacher is not None:
        results["teacher_rescore"] = probe_teacher_rescore(learner, scored, learner.teacher)
        if learner.objective.teacher.estimator in REIMPLEMENTED_ESTIMATORS:
            results["teacher_gradient"] = probe_teacher_gradient(learner, scored)
    if learner.objective.teacher is None or not learner.objective.teacher.alone:
        results["policy_gradient"] = probe_policy_gradient(learner, scored)
    if record.num_rows > 1:
        results["micro_batches"] = probe_half_batches(learner, scored, kl_coef)
    learner.discard()
    return results


def probe_rows_alone(learner: ProbedLearner, record: StepRecord, together: Tensor) -> ProbeResult:
    """Score some rows one by one, unpadded; half of them are the farthest from the sampler."""
    row_indices = sorted(_rows_to_recheck(record, together.cpu().numpy()))
    rows = select_rows(record, row_indices)
    one_by_one = _score_batches(learner, rows, learner.make_micro_batches(rows, 1))
    offsets = record.row_offsets
    return logp_difference(
        one_by_one, torch.cat([together[offsets[row] : offsets[row + 1]] for row in row_indices])
    )


def probe_float32(learner: ProbedLearner, scored: ScoredBatch, logp: Tensor) -> ProbeResult:
    """Score without the recipe's lower precision."""
    float32_scorer = TokenScorer(learner.policy.lm, temperature=learner.scorer.temperature)
    with fp32_attention(learner.policy.lm):
        in_float32 = _score_batches(learner, scored.record, scored.batches, scorer=float32_scorer)
    return logp_difference(logp, in_float32)


@torch.no_grad()
def probe_adapters_off(learner: ProbedLearner, scored: ScoredBatch, policy: Tensor) -> ProbeResult:
    """Compare the policy without its adapter, the policy, and the reference."""
    reference = scored.targets.logp_ref
    assert reference is not None  # noqa: S101 - runs only with a reference
    with learner.policy.lm.disable_adapter():
        off = _score_batches(learner, scored.record, scored.batches)
    return {
        "off_to_reference": float((off - reference).abs().mean()),
        "off_to_policy": float((off - policy).abs().mean()),
        "policy_to_reference": float((policy - reference).abs().mean()),
    }


def probe_kl_gradient(learner: ProbedLearner, scored: ScoredBatch) -> ProbeResult:
    """Compare the KL term's part of the real gradient with the formula of its estimator.

    The real part is the gradient with a coefficient of 1 minus that with 0, both without rewards.
    Other estimators are tried only where the gradient differs from its formula.
    """
    name = learner.objective.estimator
    assert name is not None  # noqa: S101 - runs only with a KL term
    gradient = _prepared_gradient(learner, scored, LossScales(kl_coef=1.0, reward=0.0, teacher=0.0))
    expected = _expected_gradient(learner, scored, name, learner.reference)
    if is_expected_gradient(gradient, expected):
        return {**compare_gradients(gradient, expected), "score_norm": None, "looks_like": name}
    gradient = gradient - _prepared_gradient(learner, scored, NO_TERMS)
    alternatives = {
        key: _expected_gradient(learner, scored, key, learner.reference)
        for key in LIKELY_ESTIMATORS
        if key != name
    }
    similarity = {
        key: abs(cosine_similarity(gradient, v))
        for key, v in {name: expected, **alternatives}.items()
    }
    return {
        **compare_gradients(gradient, expected),
        "score_norm": vector_norm(expected if name == "k1" else alternatives["k1"]),
        "looks_like": max(similarity, key=lambda key: similarity[key]),
    }


@torch.no_grad()
def probe_teacher_rescore(
    learner: ProbedLearner, scored: ScoredBatch, teacher: Reference
) -> ProbeResult:
    """Compare the teacher's log-probs of a scored batch with a direct scoring of its rows."""
    used = scored.targets.logp_teacher
    assert used is not None  # noqa: S101 - scored with a teacher
    by_batch = [teacher.logp(teacher.hidden(b.layout), b.layout.targets) for b in scored.batches]
    direct = gather_tokens(by_batch, scored.batches, scored.record.num_tokens, learner.group)
    return logp_difference(used[scored.targets.loss_mask], direct[scored.targets.loss_mask])


def probe_teacher_gradient(learner: ProbedLearner, scored: ScoredBatch) -> ProbeResult:
    """Compare the teacher term's real gradient with the formula of its estimator."""
    term = learner.objective.teacher
    assert term is not None  # noqa: S101 - runs only with a teacher
    gradient = _prepared_gradient(learner, scored, LossScales(kl_coef=0.0, reward=0.0))
    # the formulas below read the log-probs of the model that they are measured to as `logp_ref`
    as_reference = replace(scored.targets, logp_ref=scored.targets.logp_teacher)
    expected = _expected_gradient(
        learner, replace(scored, targets=as_reference), term.estimator, learner.teacher
    )
    return compare_gradients(gradient / term.coef, expected)


def probe_policy_gradient(learner: ProbedLearner, scored: ScoredBatch) -> ProbeResult:
    """Compare the policy term's gradient with that of -advantage times logp.

    The batch is scored by the current weights, so the ratio is 1.
    """
    gradient = _prepared_gradient(learner, scored, LossScales(kl_coef=0.0, teacher=0.0))
    gradient = gradient - _prepared_gradient(learner, scored, NO_TERMS)
    for batch in scored.batches:
        targets = scored.targets.select_batch(batch)
        logp = learner.scorer(batch.layout).logp
        lengths = targets.row_offsets.diff()
        advantage = torch.repeat_interleave(targets.advantage, lengths)
        inside = torch.where(targets.loss_mask, -advantage * targets.policy_weight * logp, 0.0)
        torch.autograd.backward(inside.sum())
    return compare_gradients(gradient, _take_gradient_sample(learner))


def probe_half_batches(learner: ProbedLearner, scored: ScoredBatch, kl_coef: float) -> ProbeResult:
    """Compare the gradient with that of micro-batches of half the size."""
    scales, record = LossScales(kl_coef=kl_coef), scored.record
    full_gradient = _prepared_gradient(learner, scored, scales)
    batches = learner.make_micro_batches(
        record, max(1, min(learner.settings.micro_batch_size, record.num_rows) // 2)
    )
    none: list[RefHidden | None] = [None] * len(batches)
    rescaled = replace(scored, batches=batches, ref_hidden=none, teacher_hidden=none)
    return compare_gradients(_prepared_gradient(learner, rescaled, scales), full_gradient)


def _term_derivatives(
    targets: LossTargets, logp: Tensor, sampling: ImportanceSampling
) -> Iterator[tuple[str, Tensor]]:
    """Yield d(term)/d(logp) for each estimator."""
    assert targets.logp_ref is not None  # noqa: S101 - runs only with a reference
    d = (logp - targets.logp_ref).detach()
    yield "unbiased", _importance_weight(targets, logp, sampling) * d
    yield "k1", torch.ones_like(d)
    yield "k2", d
    yield "k3", -torch.expm1(-d)
    yield "k3_plus", d


def _importance_weight(targets: LossTargets, logp: Tensor, sampling: ImportanceSampling) -> Tensor:
    """Return the importance weights, implemented again, independent of `maths`."""
    if targets.logp_sampler is None:
        return torch.ones_like(logp)
    log_ratio = torch.where(targets.loss_mask, logp.detach() - targets.logp_sampler, 0.0)
    log_ratio = log_ratio.nan_to_num(0.0)  # NaN where the sampler reported nothing
    if sampling.by_sequence:
        rows = torch.split(log_ratio, targets.row_offsets.diff().tolist())
        log_ratio = torch.cat([row.sum().expand(len(row)) for row in rows])
    weight = log_ratio.exp()
    capped = torch.zeros_like(weight) if sampling.masks else weight.clamp(max=sampling.cap)
    return torch.where(weight > sampling.cap, capped, weight)


LIKELY_ESTIMATORS = ("unbiased", "k1", "k3")
"""The estimators that a wrong KL term most often turns out to be."""
REIMPLEMENTED_ESTIMATORS = ("unbiased", "k1", "k2", "k3", "k3_plus", "exact", "topk")
"""Estimators whose gradient is implemented here again, independent of the training code."""
PROBED_ESTIMATORS = (
    *REIMPLEMENTED_ESTIMATORS,
    *(name for name in ESTIMATORS if name not in (*REIMPLEMENTED_ESTIMATORS, "sequence")),
)
"""Those, and estimators evaluated by the formula in `maths`, bypassing the learner's loss."""


def _expected_gradient(
    learner: ProbedLearner, scored: ScoredBatch, name: str, frozen: Reference | None
) -> Tensor:
    """Return the gradient of an estimator's KL to a frozen model, the reference or the teacher."""
    learner.discard()
    sampling = learner.objective.importance_sampling
    for batch in scored.batches:
        targets = scored.targets.select_batch(batch)
        if name in ("exact", "topk"):
            assert frozen is not None  # noqa: S101 - runs only with one
            states = replace(frozen.hidden(batch.layout), topk=name == "topk")
            scores = learner.scorer(batch.layout, states)
            terms = scores.kl_exact if name == "exact" else scores.kl_topk
            if sampling.by_sequence:
                terms = terms * _importance_weight(targets, scores.logp, sampling)
        elif name in REIMPLEMENTED_ESTIMATORS:
            logp = learner.scorer(batch.layout).logp
            terms = dict(_term_derivatives(targets, logp, sampling))[name] * logp
        else:
            assert targets.logp_ref is not None  # noqa: S101 - runs only with a reference
            scores = learner.scorer(batch.layout)
            # no estimator left here needs the vocabulary
            inputs = kl_inputs(scores, targets, targets.logp_ref, learner.objective)
            terms = ESTIMATORS[name].term(inputs.zero_outside_mask())
        inside = torch.where(targets.loss_mask, targets.kl_weight * terms, 0.0)
        torch.autograd.backward(inside.sum())
    return _take_gradient_sample(learner)


def _prepared_gradient(learner: ProbedLearner, scored: ScoredBatch, scales: LossScales) -> Tensor:
    learner.prepare(scored, scales)
    return _take_gradient_sample(learner)


def _take_gradient_sample(learner: ProbedLearner) -> Tensor:
    """Return evenly spaced entries of every gradient, concatenated, and drop the gradients."""
    entries = sampled_entries(learner.current_gradients())
    learner.discard()
    return entries


@torch.no_grad()
def _score_batches(
    learner: ProbedLearner,
    record: StepRecord,
    batches: list[MicroBatch],
    *,
    scorer: TokenScorer | None = None,
) -> Tensor:
    scorer = learner.scorer if scorer is None else scorer
    logp = [scorer(batch.layout).logp for batch in batches]
    return gather_tokens(logp, batches, record.num_tokens, learner.group)


def _rows_to_recheck(record: StepRecord, logp: np.ndarray) -> set[int]:
    """Return the rows that differ most from the sampler's log-probs, and some spaced evenly."""
    spread = np.linspace(0, record.num_rows - 1, NUM_ROWS_ALONE // 2).astype(int).tolist()
    if record.logp_sampler is None:
        return set(spread)
    difference = np.nan_to_num(np.abs(logp - record.logp_sampler))
    cumulative = np.concatenate([[0.0], np.cumsum(difference)])[record.row_offsets]
    return {*spread, *np.argsort(-np.diff(cumulative))[: NUM_ROWS_ALONE // 2].tolist()}
