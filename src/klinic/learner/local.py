"""The learner in one process: score, prepare, then commit or discard.

It runs alone or as one rank of a process group in which all ranks make the same calls: each runs
its own micro-batches, and per-token results are all-reduced.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klinic.evidence.measures import ClipRange
from klinic.evidence.metrics import mean_k1, update_kl, updates_metrics
from klinic.evidence.record import ProbeResult, StepRecord, first_rows
from klinic.evidence.store import RecordWriter
from klinic.learner import checkpoint, probes
from klinic.learner.diagnostics import SplitGradients, is_diagnostic_step, kl_gradient_facts
from klinic.learner.frozen_states import hidden_states, sampled_states, states_for_update
from klinic.learner.micro_batch_loss import MicroBatchLoss, kl_sum, read_sums, teacher_sum
from klinic.learner.objective import (
    LossTargets,
    LossTerms,
    Objective,
    loss_targets,
    sequence_baseline,
)
from klinic.learner.packing import MicroBatch, make_micro_batches
from klinic.learner.process_group import SINGLE_PROCESS, ProcessGroup
from klinic.learner.protocol import LearnerState, LossScales, PreparedUpdate, RecordSink
from klinic.learner.scored_batch import ScoredBatch
from klinic.learner.settings import LearnerSettings
from klinic.learner.step_results import (
    complete_record,
    detach_loss_terms,
    finite_at,
    kl_to_start,
    loss_denominator,
    mean_over_trained,
    update_metrics,
)
from klinic.learner.step_rows import StepRows
from klinic.learner.update import (
    clip_gradients,
    groups_finite,
    make_optimizer,
    set_learning_rate,
    total_norm,
)
from klinic.maths.arrays import row_of_token, segment_sum
from klinic.maths.kl import k1
from klinic.model.layout import TokenTargets
from klinic.model.loading import Policy
from klinic.model.moving_reference import MovingReference, MovingReferenceIdentity
from klinic.model.policy_source import PolicySource
from klinic.model.reference import Reference
from klinic.model.scorer import RefHidden
from klinic.model.token_scores import TokenScores


class LocalLearner(PolicySource):
    """A policy, its reference, its teacher and its optimizer in this process."""

    def __init__(
        self,
        policy: Policy,
        reference: Reference | None,
        *,
        objective: Objective,
        settings: LearnerSettings,
        group: ProcessGroup = SINGLE_PROCESS,
        teacher: Reference | None = None,
    ) -> None:
        super().__init__(policy)
        self.group = group
        self.scorer = policy.scorer
        self.reference = reference
        self.teacher = teacher
        self.objective = objective
        self.settings = settings
        self._optimizer = make_optimizer(
            policy.lm, weight_decay=settings.weight_decay, betas=settings.adam_betas
        )
        self._grad_norm = 0.0
        self._is_diagnostic = False

    def score(self, record: StepRecord, *, needs_reference: bool) -> ScoredBatch:
        """Score a batch with policy, reference and teacher before its updates."""
        batches = self.make_micro_batches(record, self.settings.micro_batch_size)
        rows = StepRows(record=record, batches=batches, group=self.group)
        return self._score_rows(rows, needs_reference=needs_reference)

    @torch.no_grad()
    def _score_rows(self, rows: StepRows, *, needs_reference: bool) -> ScoredBatch:
        record, batches = rows.record, rows.batches
        head: Tensor = self.policy.lm.get_output_embeddings().weight
        like = torch.empty(0, dtype=head.dtype, device=head.device)
        targets = loss_targets(record, self.objective, like, rows.merge)
        reference = self.reference if needs_reference else None
        hidden = hidden_states(reference, batches)
        teacher_hidden = hidden_states(self.teacher, batches)
        targets, hidden = self._with_old_logp(rows, targets, hidden, teacher_hidden)
        targets = replace(
            targets,
            logp_ref=self._frozen_logp(reference, hidden, rows),
            logp_teacher=self._frozen_logp(self.teacher, teacher_hidden, rows),
        )
        # keep all hidden states if the single update needs them: the model then runs once
        single = self.settings.updates_per_batch == 1
        if not (self.objective.needs_vocabulary and single):
            hidden = sampled_states(record, batches, hidden)
        if not (self.objective.teacher_needs_vocabulary and single):
            teacher_hidden = sampled_states(record, batches, teacher_hidden)
        return ScoredBatch(
            record=record,
            batches=batches,
            group=rows.group,
            share=rows.share,
            targets=targets,
            ref_hidden=hidden,
            teacher_hidden=teacher_hidden,
            logp_start=self._logp_start(rows),
            reference_fingerprint=None
            if self.reference is None
            else self.reference.current_fingerprint(),
            teacher_fingerprint=None
            if self.teacher is None
            else self.teacher.current_fingerprint(),
        )

    def _frozen_logp(
        self, frozen: Reference | None, hidden: list[RefHidden | None], rows: StepRows
    ) -> Tensor | None:
        """Return the log-probs of all tokens under a frozen model, if there is one."""
        if frozen is None:
            return None
        logp = [
            frozen.logp(h, b.layout.targets)
            for h, b in zip(hidden, rows.batches, strict=True)
            if h is not None
        ]
        return rows.gather_tokens(logp)

    def make_micro_batches(self, record: StepRecord, size: int) -> list[MicroBatch]:
        """Split this rank's rows into micro-batches of at most `size` rows of the longest.

        Where the sampler truncates, they hold the sets of tokens that the current policy keeps.
        """
        batches = make_micro_batches(
            record,
            size=size,
            pad_id=self.policy.pad_id,
            device=self.scorer.device,
            packed=self.settings.packed,
            group=self.group,
        )
        return self.with_kept_tokens(batches)

    def with_kept_tokens(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Add the sets of tokens that a truncated sampler keeps, where it truncates."""
        filters = self.settings.filters
        if not filters.has_filters:
            return batches
        return [b.with_kept(self.scorer.kept_tokens(b.layout, filters)) for b in batches]

    def _logp_start(self, rows: StepRows) -> Tensor | None:
        moving, step = self.reference, rows.record.step
        if not isinstance(moving, MovingReference) or moving.step == 0:
            return None
        if not is_diagnostic_step(step) and step != moving.last_reset + 1:
            return None
        start = moving.start_reference
        logp = [start.logp(start.hidden(b.layout), b.layout.targets) for b in rows.batches]
        return rows.gather_tokens(logp)

    def _with_old_logp(
        self,
        rows: StepRows,
        targets: LossTargets,
        hidden: list[RefHidden | None],
        teacher_hidden: list[RefHidden | None],
    ) -> tuple[LossTargets, list[RefHidden | None]]:
        """Score the policy where the current log-probs cannot serve as `logp_old`."""
        for_reference = self.objective.needs_baseline and hidden[0] is not None
        for_teacher = self.objective.teacher_needs_baseline and teacher_hidden[0] is not None
        baseline = for_reference or for_teacher
        # always on the first step, where equality is measured instead of assumed
        if self.settings.updates_per_batch == 1 and rows.record.step > 1 and not baseline:
            return targets, hidden
        old, scores_by_batch, hidden_with_top = [], [], []
        for batch, ref, teacher in zip(rows.batches, hidden, teacher_hidden, strict=True):
            states, token_targets = self.scorer.hidden(batch.layout), batch.layout.targets
            if baseline:
                frozen = (ref if for_reference else None, teacher if for_teacher else None)
                scores = self.scorer.score(states, token_targets, *frozen)
                old.append(scores.logp)
                scores_by_batch.append(scores)
            else:
                old.append(self.scorer.logp(states, token_targets))
            hidden_with_top.append(self._store_top_k(states, token_targets, ref))
        targets = replace(targets, logp_old=rows.gather_tokens(old))
        return self._with_baselines(targets, scores_by_batch, rows), hidden_with_top

    def _with_baselines(
        self, targets: LossTargets, scores_by_batch: list[TokenScores], rows: StepRows
    ) -> LossTargets:
        """Return the targets with the baselines of `sequence` for which a KL was scored."""
        to_reference = [s.kl_exact for s in scores_by_batch if s.kl_exact is not None]
        to_teacher = [s.teacher_kl_exact for s in scores_by_batch if s.teacher_kl_exact is not None]
        if to_reference:
            baseline = sequence_baseline(rows.gather_tokens(to_reference), targets, rows)
            targets = replace(targets, kl_baseline=baseline)
        if to_teacher:
            baseline = sequence_baseline(rows.gather_tokens(to_teacher), targets, rows)
            targets = replace(targets, teacher_baseline=baseline)
        return targets

    def _store_top_k(
        self, states: Tensor, targets: TokenTargets, ref: RefHidden | None
    ) -> RefHidden | None:
        """Store the reference's top-k log-probs where the updates need only those."""
        if ref is None or not self.settings.stores_top_k(self.objective):
            return ref
        return replace(ref, top=self.scorer.reference_top_k(states, targets, ref))

    def prepare(self, scored: ScoredBatch, scales: LossScales) -> PreparedUpdate:
        """Compute the loss and its gradient; weights do not change."""
        kl_coef, teacher_coef = scales.kl_coef, self._teacher_coef(scales)
        self.discard()
        self._is_diagnostic = is_diagnostic_step(scored.record.step)
        splits = self._is_diagnostic and bool(kl_coef or teacher_coef)
        split_gradients = SplitGradients(self._trained.values()) if splits else None
        objective = replace(
            self.objective,
            estimator=self.objective.estimator if kl_coef else None,
            teacher=self.objective.teacher if teacher_coef else None,
        )
        reward_scale = 0.0 if self._trains_on_teacher_alone else scales.reward
        terms_by_batch: list[LossTerms] = []

        def to_scalar(terms: LossTerms) -> Tensor:
            # scale the term, not the advantage, which stays unchanged in the record
            terms = replace(terms, policy=reward_scale * terms.policy)
            terms_by_batch.append(detach_loss_terms(terms))
            if split_gradients is not None:
                return terms.policy
            return terms.total_loss(kl_coef=kl_coef, teacher_coef=teacher_coef)

        scores_by_batch = self._backprop_batches(scored, objective, to_scalar)
        split_metrics = {}
        if split_gradients is not None:
            split_gradients.store("policy")
            if kl_coef:
                self._backprop_batches(scored, objective, kl_sum)
                split_gradients.store("kl", kl_coef)
            if teacher_coef:
                self._backprop_batches(scored, objective, teacher_sum)
                split_gradients.store("teacher", teacher_coef)
            split_metrics = split_gradients.combine()
        self._grad_norm = total_norm(self.current_gradients())
        return self._make_prepared(scored, scores_by_batch, terms_by_batch, scales, split_metrics)

    def _teacher_coef(self, scales: LossScales) -> float:
        teacher = self.objective.teacher
        return 0.0 if teacher is None or self.teacher is None else scales.teacher * teacher.coef

    @property
    def _trains_on_teacher_alone(self) -> bool:
        """Whether the KL to the teacher replaces the policy term."""
        return self.objective.teacher is not None and self.objective.teacher.alone

    def _backprop_batches(
        self,
        scored: ScoredBatch,
        objective: Objective,
        to_scalar: Callable[[LossTerms], Tensor],
    ) -> list[TokenScores]:
        """Run every micro-batch forward and backward; return its token scores."""
        scores_by_batch = []
        for batch, reference, teacher in self._batches_with_frozen(scored, objective):
            loss = MicroBatchLoss(scored.targets.select_batch(batch), objective, to_scalar)
            scores, number = self.scorer.score_and_loss(
                batch.layout,
                reference,
                loss,
                token_by_token=objective.token_by_token,
                teacher=teacher,
            )
            self._release_frozen()
            torch.autograd.backward(number)
            scores_by_batch.append(scores)
        return scores_by_batch

    def _release_frozen(self) -> None:
        """Release memory that reference and teacher do not need during a backward pass."""

    def _batches_with_frozen(
        self, scored: ScoredBatch, objective: Objective
    ) -> Iterator[tuple[MicroBatch, RefHidden | None, RefHidden | None]]:
        """Yield each micro-batch with the hidden states of reference and teacher for its KLs."""
        to_teacher = None if objective.teacher is None else objective.teacher.estimator
        teacher_hidden = scored.teacher_hidden or [None] * len(scored.batches)
        for batch, ref, teacher in zip(
            scored.batches, scored.ref_hidden, teacher_hidden, strict=True
        ):
            yield (
                batch,
                states_for_update(self.reference, ref, batch, objective.estimator),
                states_for_update(self.teacher, teacher, batch, to_teacher),
            )

    def _make_prepared(
        self,
        scored: ScoredBatch,
        scores_by_batch: list[TokenScores],
        terms_by_batch: list[LossTerms],
        scales: LossScales,
        split_metrics: dict[str, float],
    ) -> PreparedUpdate:
        policy_loss, kl_loss, teacher_loss, saturated = (
            self._sum_over_ranks(total) for total in read_sums(terms_by_batch)
        )
        metrics = {
            "policy_loss": policy_loss,
            "grad_norm": self._grad_norm,
            "kl_coef": scales.kl_coef,
            "kl/num_saturated": saturated,
            **({} if terms_by_batch[0].kl is None else {"kl_loss": kl_loss}),
            **split_metrics,
        }
        if terms_by_batch[0].teacher is not None:
            teacher_coef = self._teacher_coef(scales)
            metrics |= {"teacher_loss": teacher_loss, "teacher_coef": teacher_coef}
        facts = self._step_facts(scored, scales) | kl_gradient_facts(split_metrics)
        merge = scored.merge
        record, policy_weight = complete_record(scored, scored.targets, scores_by_batch)
        facts["loss_denominator"] = loss_denominator(policy_weight, merge)
        metrics |= kl_to_start(record, scored.logp_start)
        metrics |= self._teacher_kl(scored, scores_by_batch)
        record = replace(record, facts={**record.facts, **facts})
        finite = finite_at(record, loss=policy_loss, grad_norm=self._grad_norm, merge=merge)
        return PreparedUpdate(
            record=record,
            metrics=metrics,
            finite_at=finite,
            mean_k1=mean_k1(record, merge),
            update_kl=update_kl(record, merge) if self.settings.updates_per_batch > 1 else 0.0,
        )

    def _sum_over_ranks(self, value: float) -> float:
        """Return the all-reduced sum of a number."""
        if self.group.size == 1:
            return value
        summed = torch.tensor(value, dtype=torch.float64, device=self.scorer.device)
        return float(self.group.all_reduce_sum(summed))

    def _teacher_kl(
        self, scored: ScoredBatch, scores_by_batch: list[TokenScores]
    ) -> dict[str, float]:
        """Return the exact KL to the teacher, averaged over the trained tokens it was scored at."""
        scored_kls = [s.teacher_kl_exact for s in scores_by_batch]
        by_token = [kl.detach() for kl in scored_kls if kl is not None]
        if not by_token:
            return {}
        kl_exact = scored.gather_tokens(by_token).cpu().numpy()
        return mean_over_trained("teacher/kl_exact", kl_exact, scored.record, scored.merge)

    def _step_facts(self, scored: ScoredBatch, scales: LossScales) -> dict[str, Any]:
        counted = [batch for batch in scored.batches if batch.is_counted]
        masks = np.split(scored.record.loss_mask, scored.record.row_offsets[1:-1])
        empty = sum(not any(masks[row].any() for row in batch.rows) for batch in counted)
        return {
            "kl_coef": scales.kl_coef,
            "learner_version": self._num_updates,
            "micro_batch_size": self.settings.micro_batch_size,
            "scoring_batch_size": self.settings.micro_batch_size,
            "num_micro_batches": int(self._sum_over_ranks(float(len(counted)))),
            "num_empty_micro_batches": int(self._sum_over_ranks(float(empty))),
            "grad_norm": self._grad_norm,
            "reference_digest": None if self.reference is None else self.reference.digest,
            "reference_fingerprint": scored.reference_fingerprint,
            "reference_step": None if self.reference is None else self.reference.step,
            **self._teacher_facts(scored, scales),
        }

    def _teacher_facts(self, scored: ScoredBatch, scales: LossScales) -> dict[str, Any]:
        if self.teacher is None:
            return {}
        return {
            "teacher_coef": self._teacher_coef(scales),
            "teacher_digest": self.teacher.digest,
            "teacher_fingerprint": scored.teacher_fingerprint,
        }

    def commit(self, *, lr_factor: float = 1.0) -> dict[str, float]:
        """Apply the prepared update at the scheduled learning rate times a factor."""
        settings, trained = self.settings, list(self._trained.values())
        gradients = [p.grad for p in trained if p.grad is not None]
        clipped = clip_gradients(
            gradients, grad_norm=self._grad_norm, max_norm=settings.max_grad_norm
        )
        rate = lr_factor * settings.learning_rate.at(self._num_updates)
        set_learning_rate(self._optimizer, rate)
        before = [p.detach().clone() for p in trained] if self._is_diagnostic else None
        with self.hold_weights():
            self._optimizer.step()
            self._num_updates += 1
        self.discard()
        diagnostics = {} if before is None else update_metrics(before, trained)
        return {"grad_norm_clipped": clipped, "learning_rate": rate, **diagnostics}

    def all_finite(self) -> dict[str, bool]:
        """Whether all weights and optimizer moments are finite."""
        trained = [p.detach() for p in self._trained.values()]
        moments = [m for fields in self._optimizer.state.values() for m in fields.values()]
        return groups_finite({"weights": trained, "optimizer": moments})

    def measure(
        self, first: PreparedUpdate, last: PreparedUpdate, *, clip: ClipRange, kl_coef: float
    ) -> dict[str, float]:
        """Return the metrics of the trained tokens of a batch, from two of its updates."""
        return updates_metrics(first.record, last.record, clip=clip, kl_coef=kl_coef)

    @torch.no_grad()
    def update_kl(self, scored: ScoredBatch, before: StepRecord) -> float:
        """Return KL(new || old) in nats per token; `before` holds the old log-probs."""
        after = replace(before, logp=self.rescore(scored).cpu().numpy())
        return update_kl(after, scored.merge)

    @torch.no_grad()
    def rescore(self, scored: ScoredBatch) -> Tensor:
        """Return the log-probs of a batch under the current policy."""
        logp = [self.scorer(batch.layout).logp for batch in scored.batches]
        return scored.gather_tokens(logp)

    def sequence_kl(self, scored: ScoredBatch) -> np.ndarray | None:
        """Return k1 to the reference summed over each completion; None without a reference."""
        record, logp_ref = scored.record, scored.targets.logp_ref
        if logp_ref is None or record.logp_sampler is None:
            return None
        token_kl = k1(logp_p=record.logp_sampler.astype(np.float64), logp_q=logp_ref.cpu().numpy())
        is_valid = record.loss_mask & np.isfinite(token_kl)
        rows = row_of_token(record.row_offsets)
        return scored.gather_rows(
            segment_sum(np.where(is_valid, token_kl, 0.0), rows, record.num_rows)
        )

    def probe(self, record: StepRecord, *, kl_coef: float) -> dict[str, ProbeResult]:
        """Run the active probes on some completions of a step."""
        return probes.run_probes(self, first_rows(record, probes.NUM_PROBED_ROWS), kl_coef=kl_coef)

    def current_gradients(self) -> list[Tensor]:
        """Return the prepared gradients of the trained tensors."""
        return [p.grad for p in self._trained.values() if p.grad is not None]

    def discard(self) -> None:
        """Drop the prepared gradient."""
        self._optimizer.zero_grad(set_to_none=True)

    def move_reference(
        self, step: int, *, keep: float, forget_moments: bool
    ) -> MovingReferenceIdentity | None:
        """Move the reference towards the policy after a step; return its new identity."""
        if not isinstance(self.reference, MovingReference):
            return None
        self.reference.move_towards_policy(step=step, keep=keep)
        if forget_moments:
            self._optimizer.state.clear()
        return self.reference.identity()

    def save(self, folder: Path) -> LearnerState:
        """Write weights and optimizer state; return the remaining state as JSON values."""
        checkpoint.save_learner(folder, self.policy, self._optimizer)
        state = LearnerState(num_updates=self._num_updates)
        if isinstance(self.reference, MovingReference):
            state["reference"] = checkpoint.save_reference(folder, self.reference)
        return state

    def load(self, folder: Path, state: LearnerState) -> None:
        """Restore a checkpoint written by `save`."""
        checkpoint.load_learner(folder, self.policy, self._optimizer)
        if isinstance(self.reference, MovingReference):
            checkpoint.load_reference(folder, self.reference, state.get("reference"))
        self._num_updates = int(state["num_updates"])
        self.discard()

    def open_records(self, run: Path) -> RecordSink:
        """Return a writer of full records."""
        return RecordWriter(run)

    def close(self) -> None:
        """Do nothing: there are no other processes."""
