"""The loss of a step, from the formulas of `maths`, as sums that can be split into micro-batches.

    loss = sum_t w_t policy_t + kl_coef * sum_t v_t kl_t + teacher_coef * sum_t v_t teacher_t

The weights w and v are computed from the masks of the full step, so the split into micro-batches
does not change the loss. The KL terms keep rows that the policy term drops. `teacher_t` is the same
function of `kl_terms.py` as `kl_t`, with the log-probs of a teacher as those of the reference.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klinic.evidence.merging import ONE_PROCESS, Merge
from klinic.evidence.record import StepRecord
from klinic.learner.packing import MicroBatch
from klinic.learner.step_rows import StepRows, find_places
from klinic.maths.arrays import sum_after
from klinic.maths.importance import ImportanceSampling, importance_weight
from klinic.maths.kl_estimators import ESTIMATORS, kl_term
from klinic.maths.kl_inputs import KLInputs, num_saturated
from klinic.maths.kl_terms import leave_one_out_baseline
from klinic.maths.masked import MaskTotals, aggregation_weights, exclude_rows, weighted_sum
from klinic.maths.surrogate import SURROGATES, PolicyInputs
from klinic.model.token_scores import TokenScores

VOCABULARY_ESTIMATORS = {"exact", "topk", "sequence"}
TOKEN_COLUMNS = (
    *("loss_mask", "policy_weight", "kl_weight"),
    *("logp_sampler", "logp_old", "logp_ref", "kl_baseline"),
    *("logp_teacher", "teacher_baseline"),
)
"""Per-token columns of `LossTargets`."""


def needs_whole_vocabulary(estimator: str | None) -> bool:
    """Whether a KL estimator needs log-probs over the full vocabulary of both models."""
    return estimator in VOCABULARY_ESTIMATORS


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTerm:
    """The KL term to a teacher."""

    estimator: str
    coef: float
    alone: bool = False
    """Whether it replaces the policy term, so that rewards have no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss: surrogate, KL estimator and clipping."""

    loss: str
    estimator: str | None
    clip_low: float
    clip_high: float
    mask_truncated: bool
    max_new_tokens: int
    importance_sampling: ImportanceSampling = field(default_factory=ImportanceSampling)
    """Weights of the KL term, and of the policy term if that is corrected."""
    corrects_policy_term: bool = False
    """Whether the policy term is weighted too: the learner's old policy against the sampler."""
    teacher: TeacherTerm | None = None

    @property
    def needs_vocabulary(self) -> bool:
        """Whether the KL term needs the reference's log-probs over the full vocabulary."""
        return needs_whole_vocabulary(self.estimator)

    @property
    def teacher_needs_vocabulary(self) -> bool:
        """Whether the teacher term needs the teacher's log-probs over the full vocabulary."""
        return self.teacher is not None and needs_whole_vocabulary(self.teacher.estimator)

    @property
    def kl_estimators(self) -> tuple[str, ...]:
        """The estimators of the KL terms: to the reference and to the teacher."""
        teacher = None if self.teacher is None else self.teacher.estimator
        return tuple(name for name in (self.estimator, teacher) if name is not None)

    @property
    def token_by_token(self) -> bool:
        """Whether no token's loss depends on other tokens of its row."""
        if SURROGATES[self.loss].needs_whole_row or self.importance_sampling.by_sequence:
            return False
        return not any(ESTIMATORS[name].needs_whole_row for name in self.kl_estimators)

    @property
    def needs_baseline(self) -> bool:
        """Whether the KL term compares a row with the other rows of its group."""
        return self.estimator == "sequence"

    @property
    def teacher_needs_baseline(self) -> bool:
        """Whether the teacher term compares a row with the other rows of its group."""
        return self.teacher is not None and self.teacher.estimator == "sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTargets:
    """Per-token and per-row inputs of the loss for a step."""

    row_offsets: Tensor
    group: Tensor
    advantage: Tensor
    loss_mask: Tensor
    policy_weight: Tensor
    kl_weight: Tensor
    logp_sampler: Tensor | None
    logp_old: Tensor | None = None
    """None where the batch is used once: then the current log-probs are the old ones."""
    logp_ref: Tensor | None = None
    """Log-probs under the reference, which every estimator and the record use; None without one."""
    kl_baseline: Tensor | None = None
    logp_teacher: Tensor | None = None
    """Log-probs under the teacher; None without one."""
    teacher_baseline: Tensor | None = None

    def select_batch(self, batch: MicroBatch) -> "LossTargets":
        """Return the targets of a micro-batch; a filler micro-batch has no trained token."""
        offsets = batch.row_offsets.to(self.row_offsets)
        by_row = {name: getattr(self, name)[batch.row_ids] for name in ("group", "advantage")}
        by_token: dict[str, Any] = {
            name: None if (x := getattr(self, name)) is None else x[batch.tokens]
            for name in TOKEN_COLUMNS
        }
        if not batch.is_counted:
            by_token |= {
                name: torch.zeros_like(by_token[name])
                for name in ("loss_mask", "policy_weight", "kl_weight")
            }
        return replace(self, row_offsets=offsets, **by_row, **by_token)

    def slice_tokens(self, tokens: slice) -> "LossTargets":
        """Return the targets of a slice of tokens; rows may be cut or empty."""
        if tokens == slice(0, len(self.loss_mask)):
            return self
        offsets = (self.row_offsets - tokens.start).clamp(0, tokens.stop - tokens.start)
        by_token: dict[str, Any] = {
            name: None if (x := getattr(self, name)) is None else x[tokens]
            for name in TOKEN_COLUMNS
        }
        return replace(self, row_offsets=offsets, **by_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The sums of the loss over some tokens; `kl` and `teacher` are None without that term."""

    policy: Tensor
    kl: Tensor | None
    num_saturated: Tensor
    teacher: Tensor | None = None

    def total_loss(self, *, kl_coef: float, teacher_coef: float) -> Tensor:
        """Return the loss to minimise."""
        loss = self.policy
        if self.kl is not None and kl_coef:
            loss = loss + kl_coef * self.kl
        if self.teacher is not None and teacher_coef:
            loss = loss + teacher_coef * self.teacher
        return loss


def loss_targets(
    record: StepRecord, objective: Objective, scores_like: Tensor, merge: Merge = ONE_PROCESS
) -> LossTargets:
    """Return masks, advantages and weights of a step as tensors.

    With `merge`, the record has the rows of one process, and the weights are those of the step.
    """
    device, dtype = scores_like.device, scores_like.dtype

    def to_tensor(array: np.ndarray | None, as_: torch.dtype | None = None) -> Any:
        return (
            None
            if array is None
            else torch.from_numpy(np.require(array, requirements="W")).to(device, as_)
        )

    row_offsets, loss_mask = to_tensor(record.row_offsets), to_tensor(record.loss_mask)
    dropped = dropped_rows(record, objective)
    policy_mask = exclude_rows(loss_mask, to_tensor(dropped), row_offsets)
    policy_totals, kl_totals = (
        None if counts is None else MaskTotals(num_tokens=counts[0], num_rows=counts[1])
        for counts in map(to_tensor, _count_trained(record, dropped, merge))
    )

    def token_weights(mask: Tensor, totals: MaskTotals | None) -> Tensor:
        weights: Tensor = aggregation_weights(
            SURROGATES[objective.loss].aggregation,
            loss_mask=mask,
            row_offsets=row_offsets,
            length=objective.max_new_tokens,
            dtype=dtype,
            totals=totals,
        )
        return weights

    return LossTargets(
        row_offsets=row_offsets,
        group=to_tensor(record.group),
        advantage=torch.nan_to_num(to_tensor(record.advantage, dtype)),
        loss_mask=loss_mask,
        policy_weight=token_weights(policy_mask, policy_totals),
        kl_weight=token_weights(loss_mask, kl_totals),
        logp_sampler=to_tensor(record.logp_sampler, dtype),
    )


def _count_trained(
    record: StepRecord, dropped: np.ndarray, merge: Merge
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return trained tokens and rows with any of the policy term and of all rows, over processes.

    None for one process, which counts them from its mask.
    """
    if merge.size == 1:
        return None, None
    by_row = np.diff(np.concatenate([[0], np.cumsum(record.loss_mask)])[record.row_offsets])
    kept = by_row[~dropped]
    counts = [[rows.sum(), np.count_nonzero(rows)] for rows in (kept, by_row)]
    policy, kl = merge.sum(np.array(counts, np.int64))
    return policy, kl


def dropped_rows(record: StepRecord, objective: Objective) -> np.ndarray:
    """Return the rows without policy loss: no reward, or truncated if the recipe masks those."""
    assert record.reward is not None  # noqa: S101 - the batch was scored
    dropped: np.ndarray = np.isnan(record.reward)
    if objective.mask_truncated:
        dropped = dropped | (record.finish_reason == "length")
    return dropped


def loss_terms(scores: TokenScores, targets: LossTargets, objective: Objective) -> LossTerms:
    """Return the loss terms of one micro-batch."""
    logp_old = scores.logp.detach() if targets.logp_old is None else targets.logp_old
    surrogate = SURROGATES[objective.loss]
    policy_terms = surrogate.term(
        PolicyInputs(
            advantage=targets.advantage,
            row_offsets=targets.row_offsets,
            logp=scores.logp,
            logp_old=logp_old,
            loss_mask=targets.loss_mask,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
        )
    )
    weight = targets.policy_weight
    if objective.corrects_policy_term:
        weight = weight * importance_weight(
            objective.importance_sampling,
            logp=logp_old,
            logp_sampler=_fill_sampler_logp(targets.logp_sampler, logp_old),
            loss_mask=targets.loss_mask,
            row_offsets=targets.row_offsets,
        )
    terms = LossTerms(
        policy=weighted_sum(policy_terms, weight),
        kl=None,
        num_saturated=torch.zeros((), dtype=torch.int64, device=policy_terms.device),
    )
    if objective.teacher is not None and targets.logp_teacher is not None:
        inputs = teacher_kl_inputs(scores, targets, targets.logp_teacher, objective)
        by_token = kl_term(objective.teacher.estimator, inputs, aggregation=surrogate.aggregation)
        teacher = weighted_sum(by_token, targets.kl_weight)
        terms = replace(terms, teacher=teacher, num_saturated=num_saturated(inputs))
    if objective.estimator is not None and targets.logp_ref is not None:
        inputs = kl_inputs(scores, targets, targets.logp_ref, objective)
        by_token = kl_term(objective.estimator, inputs, aggregation=surrogate.aggregation)
        kl = weighted_sum(by_token, targets.kl_weight)
        terms = replace(terms, kl=kl, num_saturated=num_saturated(inputs))
    return terms


def kl_inputs(
    scores: TokenScores, targets: LossTargets, logp_ref: Tensor, objective: Objective
) -> KLInputs:
    """Return the inputs of the KL term to the reference for one micro-batch."""
    vocabulary = objective.needs_vocabulary
    return replace(
        _token_inputs(scores, targets, logp_ref, objective),
        kl_exact=scores.kl_exact if vocabulary else None,
        kl_topk=scores.kl_topk if vocabulary else None,
        kl_baseline=targets.kl_baseline,
    )


def teacher_kl_inputs(
    scores: TokenScores, targets: LossTargets, logp_teacher: Tensor, objective: Objective
) -> KLInputs:
    """Return the inputs of the KL term to the teacher, which stands in for the reference."""
    vocabulary = objective.teacher_needs_vocabulary
    return replace(
        _token_inputs(scores, targets, logp_teacher, objective),
        kl_exact=scores.teacher_kl_exact if vocabulary else None,
        kl_topk=scores.teacher_kl_topk if vocabulary else None,
        kl_baseline=targets.teacher_baseline,
    )


def _token_inputs(
    scores: TokenScores, targets: LossTargets, logp_frozen: Tensor, objective: Objective
) -> KLInputs:
    """Return the inputs of a KL term to a frozen model, without those over the vocabulary."""
    logp_old = scores.logp.detach() if targets.logp_old is None else targets.logp_old
    return KLInputs(
        group=targets.group,
        row_offsets=targets.row_offsets,
        logp=scores.logp,
        logp_old=logp_old,
        logp_sampler=_fill_sampler_logp(targets.logp_sampler, logp_old),
        logp_ref=logp_frozen,
        loss_mask=targets.loss_mask,
        importance_sampling=objective.importance_sampling,
    )


def _fill_sampler_logp(logp_sampler: Tensor | None, logp_old: Tensor) -> Tensor:
    """Return the sampler's log-probs, and the learner's where it reported none."""
    if logp_sampler is None:
        return logp_old
    return torch.where(torch.isnan(logp_sampler), logp_old, logp_sampler)


def sequence_baseline(kl_exact: Tensor, targets: LossTargets, rows: StepRows) -> Tensor:
    """Return for every token the future KL of the other rows of its group at its position.

    Computed from all rows of the step, so splitting a group into micro-batches does not change it:
    ranks with rows of their own exchange one number per token.
    """
    trained_kl = torch.where(targets.loss_mask, kl_exact, 0.0)
    if rows.share is None:
        return _leave_one_out(trained_kl, targets.group, targets.row_offsets)
    places = find_places(rows).to(kl_exact.device)
    num_own = len(places.own)  # a rank without rows has a token that no other has
    whole = trained_kl.new_zeros(places.num_tokens)
    whole[places.own] = trained_kl[:num_own]
    whole = rows.group.all_reduce_sum(whole)
    own = _leave_one_out(whole, places.group, places.row_offsets)[places.own]
    return torch.cat([own, trained_kl.new_zeros(len(trained_kl) - num_own)])


def _leave_one_out(trained_kl: Tensor, group: Tensor, row_offsets: Tensor) -> Tensor:
    future = sum_after(trained_kl, row_offsets)
    baseline: Tensor = leave_one_out_baseline(future, group, row_offsets)
    return baseline
