"""The learner of one process: score, prepare, commit or discard."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klinic.evidence.record import StepRecord
from klinic.learner import checkpoint
from klinic.learner.objective import (
    Objective,
    Parts,
    Targets,
    loss_parts,
    sequence_baseline,
    targets_of,
)
from klinic.learner.packing import MicroBatch, micro_batches
from klinic.learner.protocol import Prepared
from klinic.learner.update import (
    LearningRate,
    clip_gradients,
    gradients,
    make_optimizer,
    norm,
    set_rate,
)
from klinic.model.loading import Policy
from klinic.model.reference import Reference
from klinic.model.scorer import RefHidden, TokenScores
from klinic.model.weights import Weights, fingerprint

LOOK_EVERY = 10  # steps between two looks at what costs a second backward pass or a copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the learner works, beside what it minimises."""

    rate: LearningRate
    weight_decay: float
    max_grad_norm: float
    micro_batch_size: int
    updates_per_batch: int


@dataclass(slots=True, kw_only=True)
class Scored:
    """A batch as policy and reference saw it before its updates."""

    record: StepRecord
    batches: list[MicroBatch]
    targets: Targets
    ref_hidden: list[RefHidden | None]
    """A sample of the reference's hidden states, a part a micro-batch."""


class LocalLearner:
    """A policy, its reference and its optimiser in this process."""

    def __init__(
        self,
        policy: Policy,
        reference: Reference | None,
        *,
        objective: Objective,
        settings: Settings,
    ) -> None:
        self._policy = policy
        self._scorer = policy.scorer
        self._reference = reference
        self._objective = objective
        self._settings = settings
        self._optimizer = make_optimizer(policy.lm, weight_decay=settings.weight_decay)
        self._num_updates = 0
        self._grad_norm = 0.0
        self._look = False

    def publish(self) -> Weights:
        """Say which weights these are; sampler and learner share them."""
        return Weights(
            version=self._num_updates,
            fingerprint=fingerprint(self._policy.lm),
            location="process",
        )

    @torch.no_grad()
    def score(self, record: StepRecord, *, needs_reference: bool) -> Scored:
        """Score a batch with the policy and the reference as they stand before its updates."""
        batches = micro_batches(
            record,
            size=self._settings.micro_batch_size,
            pad_id=self._policy.pad_id,
            device=self._scorer.device,
        )
        like = self._policy.lm.get_output_embeddings().weight[:0]
        targets = targets_of(record, self._objective, like)
        reference = self._reference if needs_reference else None
        hidden = [None if reference is None else reference.hidden(b.layout) for b in batches]
        targets = self._with_old(record, targets, batches, hidden)
        if reference is not None:
            logp_ref = [
                reference.logp(h, b.layout.target_ids)
                for h, b in zip(hidden, batches, strict=True)
                if h is not None
            ]
            targets = replace(targets, logp_ref=torch.cat(logp_ref))
        sample = [_first_of_groups(record, b, h) for b, h in zip(batches, hidden, strict=True)]
        return Scored(record=record, batches=batches, targets=targets, ref_hidden=sample)

    def _with_old(
        self,
        record: StepRecord,
        targets: Targets,
        batches: list[MicroBatch],
        hidden: list[RefHidden | None],
    ) -> Targets:
        """Score the policy itself where the current log-probs will not do as the old ones."""
        baseline = self._objective.needs_baseline and hidden[0] is not None
        # on the first step always: that it comes out equal is evidence, not an assumption
        if self._settings.updates_per_batch == 1 and record.step > 1 and not baseline:
            return targets
        scores = [
            self._scorer(b.layout, h if baseline else None)
            for b, h in zip(batches, hidden, strict=True)
        ]
        targets = replace(targets, logp_old=torch.cat([s.logp for s in scores]))
        if not baseline:
            return targets
        kl_exact = torch.cat([s.kl_exact for s in scores if s.kl_exact is not None])
        return replace(targets, kl_baseline=sequence_baseline(kl_exact, targets))

    def prepare(self, scored: Scored, *, kl_coef: float) -> Prepared:
        """Compute the loss and its gradient; nothing moves yet."""
        self.discard()
        self._look = scored.record.step % LOOK_EVERY == 1
        apart = _Apart(self._policy.lm) if self._look and kl_coef else None
        objective = self._objective if kl_coef else replace(self._objective, estimator=None)
        found: list[TokenScores] = []
        parts: list[Parts] = []
        for batch, sample in zip(scored.batches, scored.ref_hidden, strict=True):
            scores = self._scorer(batch.layout, self._ref_hidden(batch, sample, kl_coef))
            parts.append(loss_parts(scores, scored.targets.cut(batch), objective))
            self._backward(parts[-1], kl_coef, apart)
            found.append(_detached(scores))
        share = {} if apart is None else apart.join(kl_coef)
        self._grad_norm = norm(gradients(self._policy.lm))
        return self._prepared(scored, found, parts, kl_coef, share)

    def _ref_hidden(
        self, batch: MicroBatch, sample: RefHidden | None, kl_coef: float
    ) -> RefHidden | None:
        if kl_coef and self._objective.needs_vocabulary and self._reference is not None:
            return self._reference.hidden(batch.layout)
        return sample

    def _backward(self, parts: Parts, kl_coef: float, apart: "_Apart | None") -> None:
        if parts.kl is None:
            torch.autograd.backward(parts.policy)
        elif apart is None:
            torch.autograd.backward(parts.policy + kl_coef * parts.kl)
        else:
            apart.add(parts.kl)
            torch.autograd.backward(parts.policy)

    def _prepared(
        self,
        scored: Scored,
        found: list[TokenScores],
        parts: list[Parts],
        kl_coef: float,
        share: dict[str, float],
    ) -> Prepared:
        policy_loss = sum(float(p.policy.detach()) for p in parts)
        metrics = {
            "policy_loss": policy_loss,
            "grad_norm": self._grad_norm,
            "kl_coef": kl_coef,
            "kl/num_saturated": float(sum(p.num_saturated for p in parts)),
            **share,
        }
        facts = self._facts(scored, kl_coef) | share_facts(share)
        record = _completed(scored, found)
        record = replace(record, facts={**record.facts, **facts})
        finite = bool(np.isfinite([policy_loss, self._grad_norm]).all())
        return Prepared(record=record, metrics=metrics, finite=finite)

    def _facts(self, scored: Scored, kl_coef: float) -> dict[str, Any]:
        masks = [scored.targets.loss_mask[batch.tokens] for batch in scored.batches]
        return {
            "kl_coef": kl_coef,
            "learner_version": self._num_updates,
            "loss_denominator": _denominator(scored.targets.policy_weight),
            "micro_batch_size": self._settings.micro_batch_size,
            "scoring_batch_size": self._settings.micro_batch_size,
            "num_micro_batches": len(masks),
            "num_empty_micro_batches": sum(not bool(mask.any()) for mask in masks),
            "grad_norm": self._grad_norm,
            "reference_digest": None if self._reference is None else self._reference.digest,
        }

    def commit(self) -> dict[str, float]:
        """Make the update that was prepared."""
        lm, settings = self._policy.lm, self._settings
        clipped = clip_gradients(lm, grad_norm=self._grad_norm, max_norm=settings.max_grad_norm)
        rate = settings.rate.at(self._num_updates)
        set_rate(self._optimizer, rate)
        trained = [p for p in lm.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in trained] if self._look else None
        self._optimizer.step()
        self._num_updates += 1
        self.discard()
        moved = {} if before is None else _moved(before, trained)
        return {"grad_norm_clipped": clipped, "learning_rate": rate, **moved}

    def discard(self) -> None:
        """Drop the gradient that was prepared."""
        self._optimizer.zero_grad(set_to_none=True)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimiser; return the rest of the state as plain JSON values."""
        checkpoint.save(folder, self._policy, self._optimizer)
        return {"num_updates": self._num_updates}

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Go back to what `save` wrote."""
        checkpoint.load(folder, self._policy, self._optimizer)
        self._num_updates = int(state["num_updates"])
        self.discard()


class _Apart:
    """The KL term's gradient kept apart from the policy's, to see which share it has."""

    def __init__(self, lm: Any) -> None:
        self._trained = [p for p in lm.parameters() if p.requires_grad]
        self._kl: list[Tensor] | None = None

    def add(self, kl: Tensor) -> None:
        """Add the gradient of one micro-batch; its graph is needed once more."""
        new = torch.autograd.grad(
            kl, self._trained, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        self._kl = (
            list(new) if self._kl is None else [a + b for a, b in zip(self._kl, new, strict=True)]
        )

    def join(self, kl_coef: float) -> dict[str, float]:
        """Add it to the policy's gradient; return its norm, its share and the angle between."""
        if self._kl is None:
            return {}
        policy = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained]
        kl = [kl_coef * g for g in self._kl]
        dot = sum(float((a.double() * b.double()).sum()) for a, b in zip(policy, kl, strict=True))
        kl_norm, policy_norm = norm(kl), norm(policy)
        for p, a, b in zip(self._trained, policy, kl, strict=True):
            p.grad = a + b
        return {
            "kl/grad_norm_kl": kl_norm,
            "kl/grad_share": kl_norm / max(kl_norm + policy_norm, 1e-30),
            "kl/grad_cosine_policy": dot / max(kl_norm * policy_norm, 1e-30),
        }


def share_facts(share: dict[str, float]) -> dict[str, float]:
    """Return what the record keeps of the KL term's part in the gradient."""
    return {"grad_norm_kl": share["kl/grad_norm_kl"]} if share else {}


def _denominator(weights: Tensor) -> float:
    """Return one over the mean weight of a trained token: what the summed loss is divided by."""
    used = weights[weights != 0]
    return float(len(used) / used.sum()) if len(used) else 0.0


def _first_of_groups(
    record: StepRecord, batch: MicroBatch, hidden: RefHidden | None
) -> RefHidden | None:
    """Keep the reference's hidden states of the first completion of each group: a sample."""
    if hidden is None or record.sample is None:
        return None
    lengths = np.diff(record.row_offsets)[batch.rows]
    chosen = np.repeat(record.sample[batch.rows] == 0, lengths)
    return hidden.at(torch.from_numpy(np.flatnonzero(chosen)).to(hidden.hidden.device))


def _detached(scores: TokenScores) -> TokenScores:
    kl_exact = None if scores.kl_exact is None else scores.kl_exact.detach()
    return replace(scores, logp=scores.logp.detach(), kl_exact=kl_exact, kl_topk=None)


def _completed(scored: Scored, found: list[TokenScores]) -> StepRecord:
    """Return the record with what the learner found out about every token."""

    def column(name: str) -> Any:
        values = [getattr(scores, name) for scores in found]
        return None if values[0] is None else torch.cat(values).cpu().numpy()

    def array(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.cpu().numpy()

    logp = column("logp")
    logp_ref = column("logp_ref")
    return replace(
        scored.record,
        logp=logp,
        logp_old=logp if scored.targets.logp_old is None else array(scored.targets.logp_old),
        logp_ref=array(scored.targets.logp_ref) if logp_ref is None else logp_ref,
        entropy=column("entropy"),
        rank=column("rank"),
        kl_exact=column("kl_exact"),
    )


@torch.no_grad()
def _moved(before: list[Tensor], after: list[Tensor]) -> dict[str, float]:
    """Return how far an update went, and the share of parameters that it left bit-equal."""
    total = sum(p.numel() for p in after)
    unchanged = sum(int((a == b).sum()) for a, b in zip(before, after, strict=True))
    return {
        "update_norm": norm([b - a for a, b in zip(before, after, strict=True)]),
        "unchanged_share": unchanged / max(total, 1),
    }
