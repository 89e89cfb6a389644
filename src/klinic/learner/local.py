"""The learner in one process: score, prepare, then commit or discard.

It runs alone or as one rank of a process group in which all ranks make the same calls: each runs
its own micro-batches, and per-token results are all-reduced.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klinic.evidence.metrics import update_kl
from klinic.evidence.record import StepRecord
from klinic.evidence.rows import first_rows
from klinic.evidence.store import RecordWriter
from klinic.learner import checkpoint, questions
from klinic.learner.findings import (
    completed,
    denominator,
    detached_parts,
    finite_at,
    first_of_groups,
    kl_to_start,
    moved,
)
from klinic.learner.gradient_share import KLApart, share_facts
from klinic.learner.looks import looks
from klinic.learner.objective import (
    Objective,
    Parts,
    Targets,
    loss_parts,
    sequence_baseline,
    targets_of,
)
from klinic.learner.packing import MicroBatch, joined, micro_batches
from klinic.learner.protocol import Prepared, Records
from klinic.learner.team import ALONE, Team
from klinic.learner.update import (
    LearningRate,
    all_finite,
    clip_gradients,
    make_optimizer,
    norm,
    set_rate,
)
from klinic.maths.arrays import row_of_token, segment_sum
from klinic.maths.kl import k1
from klinic.model.loading import Policy
from klinic.model.moving_reference import MovingReference
from klinic.model.reference import Reference
from klinic.model.scorer import RefHidden
from klinic.model.token_scores import TokenScores
from klinic.model.weights import Weights, fingerprint, trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the learner other than its objective."""

    rate: LearningRate
    weight_decay: float
    max_grad_norm: float
    micro_batch_size: int
    updates_per_batch: int
    packed: bool = False

    def keeps_top(self, objective: Objective) -> bool:
        """Whether the reference's top-k log-probs are stored, not recomputed in every update."""
        return objective.estimator == "topk" and self.updates_per_batch > 1


@dataclass(slots=True, kw_only=True)
class Scored:
    """A batch scored by policy and reference before its updates."""

    record: StepRecord
    batches: list[MicroBatch]
    """Micro-batches of this rank."""
    targets: Targets
    ref_hidden: list[RefHidden | None]
    """The reference's hidden states, or a sample of them, per micro-batch."""
    logp_start: Tensor | None = None
    """Log-probs under the initial policy, on diagnostic steps of a moving reference."""
    reference_fingerprint: str | None = None
    """Fingerprint of the reference's current weights."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """The loss of a slice of a micro-batch's tokens, called by the scorer."""

    targets: Targets
    objective: Objective
    number_of: Callable[[Parts], Tensor]

    def __call__(self, scores: TokenScores, tokens: slice) -> Tensor:
        return self.number_of(loss_parts(scores, self.targets.of(tokens), self.objective))


def _kl_of(parts: Parts) -> Tensor:
    return 0 * parts.policy if parts.kl is None else parts.kl


class LocalLearner:
    """A policy, its reference and its optimizer in this process."""

    def __init__(
        self,
        policy: Policy,
        reference: Reference | None,
        *,
        objective: Objective,
        settings: Settings,
        team: Team = ALONE,
    ) -> None:
        self.team = team
        self._policy = policy
        self._scorer = policy.scorer
        self._reference = reference
        self._objective = objective
        self._settings = settings
        self._optimizer = make_optimizer(policy.lm, weight_decay=settings.weight_decay)
        # read once: while a sharded model is gathered, its parameters are other tensors
        self._trained = trained(policy.lm)
        self._num_updates = 0
        self._grad_norm = 0.0
        self._look = False

    def publish(self) -> Weights:
        """Return the identity of the weights, which sampler and learner share."""
        return Weights(
            version=self._num_updates,
            fingerprint=fingerprint(self._policy.lm),
            location="process",
        )

    @torch.no_grad()
    def score(self, record: StepRecord, *, needs_reference: bool) -> Scored:
        """Score a batch with policy and reference before its updates."""
        batches = self._cut(record, self._settings.micro_batch_size)
        head: Tensor = self._policy.lm.get_output_embeddings().weight
        like = torch.empty(0, dtype=head.dtype, device=head.device)
        targets = targets_of(record, self._objective, like)
        reference = self._reference if needs_reference else None
        hidden = [None if reference is None else reference.hidden(b.layout) for b in batches]
        targets, hidden = self._with_old(record, targets, batches, hidden)
        if reference is not None:
            logp_ref = [
                reference.logp(h, b.layout.target_ids)
                for h, b in zip(hidden, batches, strict=True)
                if h is not None
            ]
            targets = replace(targets, logp_ref=self._joined(logp_ref, batches, record))
        # keep all hidden states if the single update needs them: the reference then runs once
        if not (self._objective.needs_vocabulary and self._settings.updates_per_batch == 1):
            pairs = zip(batches, hidden, strict=True)
            hidden = [first_of_groups(record, b, h) for b, h in pairs]
        return Scored(
            record=record,
            batches=batches,
            targets=targets,
            ref_hidden=hidden,
            logp_start=self._logp_start(record, batches),
            reference_fingerprint=None if self._reference is None else self._reference.now(),
        )

    @property
    def packs(self) -> bool:
        """Whether rows are packed."""
        return self._settings.packed

    def _cut(self, record: StepRecord, size: int) -> list[MicroBatch]:
        return micro_batches(
            record,
            size=size,
            pad_id=self._policy.pad_id,
            device=self._scorer.device,
            packed=self.packs,
            team=self.team,
        )

    def _joined(self, parts: list[Tensor], batches: list[MicroBatch], record: StepRecord) -> Tensor:
        return joined(parts, batches, record.num_tokens, self.team)

    def _logp_start(self, record: StepRecord, batches: list[MicroBatch]) -> Tensor | None:
        moving = self._reference
        if not isinstance(moving, MovingReference) or moving.step == 0:
            return None
        if not looks(record.step) and record.step != moving.jumped + 1:
            return None
        start = moving.start
        logp = [start.logp(start.hidden(b.layout), b.layout.target_ids) for b in batches]
        return self._joined(logp, batches, record)

    def _with_old(
        self,
        record: StepRecord,
        targets: Targets,
        batches: list[MicroBatch],
        hidden: list[RefHidden | None],
    ) -> tuple[Targets, list[RefHidden | None]]:
        """Score the policy where the current log-probs cannot serve as `logp_old`."""
        baseline = self._objective.needs_baseline and hidden[0] is not None
        # always on the first step, where equality is measured instead of assumed
        if self._settings.updates_per_batch == 1 and record.step > 1 and not baseline:
            return targets, hidden
        old, exact, kept = [], [], []
        for batch, ref in zip(batches, hidden, strict=True):
            states, ids = self._scorer.hidden(batch.layout), batch.layout.target_ids
            if baseline:
                scores = self._scorer.score(states, ids, ref)
                old.append(scores.logp)
                exact.append(scores.kl_exact)
            else:
                old.append(self._scorer.logp(states, ids))
            kept.append(self._with_top(states, ref))
        targets = replace(targets, logp_old=self._joined(old, batches, record))
        if not baseline:
            return targets, kept
        kl_exact = self._joined([kl for kl in exact if kl is not None], batches, record)
        return replace(targets, kl_baseline=sequence_baseline(kl_exact, targets)), kept

    def _with_top(self, states: Tensor, ref: RefHidden | None) -> RefHidden | None:
        """Store the reference's top-k log-probs where the updates need only those."""
        if ref is None or not self._settings.keeps_top(self._objective):
            return ref
        return replace(ref, top=self._scorer.top(states, ref))

    def prepare(self, scored: Scored, *, kl_coef: float, reward_scale: float = 1.0) -> Prepared:
        """Compute the loss and its gradient; weights do not change."""
        self.discard()
        self._look = looks(scored.record.step)
        apart = KLApart(self._trained.values()) if self._look and kl_coef else None
        objective = self._objective if kl_coef else replace(self._objective, estimator=None)
        parts: list[Parts] = []

        def number_of(part: Parts) -> Tensor:
            # scale the term, not the advantage, which stays unchanged in the record
            part = replace(part, policy=reward_scale * part.policy)
            parts.append(detached_parts(part))
            return part.total(0.0 if apart is not None else kl_coef)

        found = self._learn(scored, objective, kl_coef, number_of)
        share = {}
        if apart is not None:
            apart.put_policy_aside()
            self._learn(scored, objective, kl_coef, _kl_of)
            share = apart.join(kl_coef)
        self._grad_norm = norm(self._gradients())
        return self._prepared(scored, found, parts, kl_coef, share)

    def _learn(
        self,
        scored: Scored,
        objective: Objective,
        kl_coef: float,
        number_of: Callable[[Parts], Tensor],
    ) -> list[TokenScores]:
        """Run every micro-batch forward and backward; return its token scores."""
        found = []
        for batch, reference in self._compared(scored, kl_coef):
            loss = _Loss(scored.targets.cut(batch), objective, number_of)
            scores, number = self._scorer.learn(
                batch.layout, reference, loss, token_by_token=objective.token_by_token
            )
            torch.autograd.backward(number)
            found.append(scores)
        return found

    def _compared(
        self, scored: Scored, kl_coef: float
    ) -> Iterator[tuple[MicroBatch, RefHidden | None]]:
        """Yield each micro-batch with the reference's hidden states that its KL needs."""
        whole = kl_coef and self._objective.needs_vocabulary
        for batch, known in zip(scored.batches, scored.ref_hidden, strict=True):
            kept = known is not None and known.top is not None
            if not whole or self._reference is None or kept:
                yield batch, known
                continue
            states = known
            if states is None or states.tokens is not None:
                states = self._reference.hidden(batch.layout)
            yield batch, replace(states, topk=self._objective.estimator == "topk")

    def _prepared(
        self,
        scored: Scored,
        found: list[TokenScores],
        parts: list[Parts],
        kl_coef: float,
        share: dict[str, float],
    ) -> Prepared:
        policy_loss = self._total(sum(float(p.policy) for p in parts))
        metrics = {
            "policy_loss": policy_loss,
            "grad_norm": self._grad_norm,
            "kl_coef": kl_coef,
            "kl/num_saturated": self._total(float(sum(p.num_saturated for p in parts))),
            **share,
        }
        facts = self._facts(scored, kl_coef) | share_facts(share)
        record = completed(scored.record, scored.targets, found, scored.batches, self.team)
        metrics |= kl_to_start(record, scored.logp_start)
        record = replace(record, facts={**record.facts, **facts})
        finite = finite_at(record, loss=policy_loss, grad_norm=self._grad_norm)
        return Prepared(record=record, metrics=metrics, finite_at=finite)

    def _total(self, value: float) -> float:
        """Return the all-reduced sum of a number."""
        summed = torch.tensor(value, dtype=torch.float64, device=self._scorer.device)
        return float(self.team.sum(summed))

    def _facts(self, scored: Scored, kl_coef: float) -> dict[str, Any]:
        counted = [batch.tokens for batch in scored.batches if batch.counts]
        empty = sum(not bool(scored.targets.loss_mask[tokens].any()) for tokens in counted)
        return {
            "kl_coef": kl_coef,
            "learner_version": self._num_updates,
            "loss_denominator": denominator(scored.targets.policy_weight),
            "micro_batch_size": self._settings.micro_batch_size,
            "scoring_batch_size": self._settings.micro_batch_size,
            "num_micro_batches": int(self._total(float(len(counted)))),
            "num_empty_micro_batches": int(self._total(float(empty))),
            "grad_norm": self._grad_norm,
            "reference_digest": None if self._reference is None else self._reference.digest,
            "reference_fingerprint": scored.reference_fingerprint,
            "reference_step": None if self._reference is None else self._reference.step,
        }

    def commit(self, *, lr_factor: float = 1.0) -> dict[str, float]:
        """Apply the prepared update at the scheduled learning rate times a factor."""
        settings, trained = self._settings, list(self._trained.values())
        gradients = [p.grad for p in trained if p.grad is not None]
        clipped = clip_gradients(
            gradients, grad_norm=self._grad_norm, max_norm=settings.max_grad_norm
        )
        rate = lr_factor * settings.rate.at(self._num_updates)
        set_rate(self._optimizer, rate)
        before = [p.detach().clone() for p in trained] if self._look else None
        self._optimizer.step()
        self._num_updates += 1
        self.discard()
        looked = {} if before is None else moved(before, trained)
        return {"grad_norm_clipped": clipped, "learning_rate": rate, **looked}

    def sound(self) -> dict[str, bool]:
        """Whether all weights and optimizer moments are finite."""
        trained = [p.detach() for p in self._trained.values()]
        moments = [m for fields in self._optimizer.state.values() for m in fields.values()]
        return {"weights": all_finite(trained), "optimizer": all_finite(moments)}

    @torch.no_grad()
    def update_kl(self, scored: Scored, before: StepRecord) -> float:
        """Return KL(new || old) in nats per token; `before` holds the old log-probs."""
        return update_kl(replace(before, logp=self.rescore(scored).cpu().numpy()))

    @torch.no_grad()
    def rescore(self, scored: Scored) -> Tensor:
        """Return the log-probs of a batch under the current policy."""
        logp = [self._scorer(batch.layout).logp for batch in scored.batches]
        return self._joined(logp, scored.batches, scored.record)

    def sequence_kl(self, scored: Scored) -> np.ndarray | None:
        """Return k1 to the reference summed over each completion; None without a reference."""
        record, logp_ref = scored.record, scored.targets.logp_ref
        if logp_ref is None or record.logp_sampler is None:
            return None
        apart = k1(logp_p=record.logp_sampler.astype(np.float64), logp_q=logp_ref.cpu().numpy())
        known = record.loss_mask & np.isfinite(apart)
        rows = row_of_token(record.row_offsets)
        sums: np.ndarray = segment_sum(np.where(known, apart, 0.0), rows, record.num_rows)
        return sums

    def probe(self, record: StepRecord, *, kl_coef: float) -> dict[str, dict[str, Any]]:
        """Run the active probes on some completions of a step."""
        asked = questions.Asked(
            lm=self._policy.lm,
            scorer=self._scorer,
            reference=self._reference,
            objective=self._objective,
            size=self._settings.micro_batch_size,
            team=self.team,
            cut=self._cut,
            gradients=self._gradients,
            score=self.score,
            prepare=self.prepare,
            discard=self.discard,
        )
        return questions.ask(asked, first_rows(record, questions.ROWS), kl_coef=kl_coef)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._trained.values() if p.grad is not None]

    def discard(self) -> None:
        """Drop the prepared gradient."""
        self._optimizer.zero_grad(set_to_none=True)

    def move_reference(
        self, step: int, *, keep: float, forget_moments: bool
    ) -> dict[str, Any] | None:
        """Move the reference towards the policy after a step; return its new identity."""
        if not isinstance(self._reference, MovingReference):
            return None
        self._reference.move(step=step, keep=keep)
        if forget_moments:
            self._optimizer.state.clear()
        return self._reference.identity()

    def save(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimizer state; return the remaining state as JSON values."""
        checkpoint.save(folder, self._policy, self._optimizer)
        moving = checkpoint.save_reference(folder, self._reference)
        return {"num_updates": self._num_updates, **moving}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore a checkpoint written by `save`."""
        checkpoint.load(folder, self._policy, self._optimizer)
        checkpoint.load_reference(folder, self._reference, state)
        self._num_updates = int(state["num_updates"])
        self.discard()

    def records(self, run: Path) -> Records:
        """Return a writer of full records."""
        return RecordWriter(run)

    def close(self) -> None:
        """Do nothing: there are no other processes."""
