"""Active probes of a live TRL trainer.

Probes leave weights, gradients and RNG state unchanged: `torch.autograd.grad` does not touch
`parameter.grad`. They use a few completions and compare with an implementation independent of
TRL's loss.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klinic.evidence.processes import Processes, all_gather_json
from klinic.evidence.record import ProbeResult
from klinic.integrations.trl.kl_term import SUPPORTED_LOSSES, token_weights
from klinic.integrations.trl.scoring import (
    Batch,
    Score,
    kl_inputs,
    score_completions,
    select_rows,
    trained_mask,
    unpad_row,
    without_side_effects,
)
from klinic.integrations.trl.sharding import has_gradients, loss_gradients
from klinic.learner.probes import (
    LIKELY_ESTIMATORS,
    NUM_PROBED_ROWS,
    NUM_ROWS_ALONE,
    PROBED_ESTIMATORS,
    compare_gradients,
    cosine_similarity,
    is_expected_gradient,
    logp_difference,
    sampled_entries,
    vector_norm,
)
from klinic.maths.kl_estimators import ESTIMATORS
from klinic.model.dropout import max_dropout_rate

LOCAL_DENOMINATOR_LOSSES = ("bnpo",)
"""Losses that divide by a micro-batch's own tokens: splitting changes them by design."""
MAX_LOG_RATIO = 1e-2  # nats from the old log-probs: rounding, far inside every clip range
WHOLE_VOCABULARY_ESTIMATORS = ("exact", "topk")


@dataclass(frozen=True, slots=True, kw_only=True)
class TRLProbeTarget:
    """A trainer, its scoring and loss, and the batch to probe it on."""

    trainer: Any
    model: Any
    score: Score
    loss: Callable[[Any, Batch], Tensor]
    estimator: str | None
    """Estimator of the KL term in the loss; None without one."""
    uses_sampler_logp: bool
    """Whether the term weights tokens by the sampler's log-probs; TRL's own does not."""
    override_coef: Callable[[float], AbstractContextManager[None]]
    """A context manager that overrides the coefficient of the term."""
    processes: Processes
    """All make the same passes: under FSDP2 each is a collective."""
    batch: Batch
    """Some rows of a micro-batch."""
    logp_sampler: list[np.ndarray] | None
    """The sampler's log-probs of these rows."""


def probe_rows(batch: Batch) -> list[int]:
    """Return the rows to probe: an even number, so that they can be halved."""
    rows = min(NUM_PROBED_ROWS, len(batch["completion_ids"]))
    return list(range(rows if rows < 2 else rows // 2 * 2))


def run_probes(target: TRLProbeTarget) -> dict[str, ProbeResult]:
    """Return the result of every probe that this trainer supports."""
    with without_side_effects(target.trainer):
        first, second = _score_batch(target, target.batch), _score_batch(target, target.batch)
    mask = trained_mask(target.batch)
    results: dict[str, ProbeResult] = {}
    # dropout samples another mask for another shape: halves would differ by chance
    has_no_dropout = max_dropout_rate(target.model) == 0
    can_halve = has_no_dropout and len(mask) > 1
    own_tokens = bool(mask.any())
    own = [own_tokens, own_tokens and _has_plain_gradient(target, first), can_halve]
    has_tokens, is_plain, can_halve = (
        all(flags) for flags in zip(*all_gather_json(target.processes, own), strict=True)
    )
    if has_tokens:
        results["rescore"] = logp_difference(first[mask], second[mask])
        results["rescore_alone"] = _rescore_alone(target, first)
    if not has_gradients(target.trainer):
        return results
    if (
        target.estimator in PROBED_ESTIMATORS
        and target.estimator not in WHOLE_VOCABULARY_ESTIMATORS
        and target.trainer.loss_type in SUPPORTED_LOSSES
    ):
        results["kl_gradient"] = _probe_kl_gradient(target, str(target.estimator))
    if has_tokens and is_plain:
        results["policy_gradient"] = _probe_policy_gradient(target)
    if can_halve and target.trainer.loss_type not in LOCAL_DENOMINATOR_LOSSES:
        results["micro_batches"] = _probe_micro_batches(target)
    return results


@torch.no_grad()
def _score_batch(target: TRLProbeTarget, batch: Batch) -> Tensor:
    return score_completions(target.score, target.model, batch).detach()


def _rescore_alone(target: TRLProbeTarget, together: Tensor) -> ProbeResult:
    """Score some rows alone, unpadded, and compare them with the batch scores."""
    alone_logp, batch_logp = [], []
    rows = sorted(_rows_to_rescore(target, together))
    if target.processes.size > 1:  # as many passes in each
        rows += rows[:1] * (NUM_ROWS_ALONE - len(rows))
    for row in rows:
        single_row = unpad_row(target.batch, row)
        mask = trained_mask(single_row)[0]
        with without_side_effects(target.trainer):
            alone_logp.append(_score_batch(target, single_row)[0][mask])
        batch_logp.append(together[row, : len(mask)][mask])
    return logp_difference(torch.cat(alone_logp), torch.cat(batch_logp))


def _rows_to_rescore(target: TRLProbeTarget, logp: Tensor) -> set[int]:
    mask = trained_mask(target.batch)
    used = torch.nonzero(mask.any(dim=1))[:, 0].tolist()
    spread = {used[at] for at in np.linspace(0, len(used) - 1, NUM_ROWS_ALONE // 2).astype(int)}
    if target.logp_sampler is None:
        return spread
    policy_logp = logp.float().cpu().numpy()
    distances = [
        float(np.nansum(np.abs(policy_logp[row, : len(row_logp)] - row_logp)))
        for row, row_logp in enumerate(target.logp_sampler)
    ]
    farthest = sorted(used, key=lambda row: -distances[row])[: NUM_ROWS_ALONE // 2]
    return {*spread, *farthest}


def _probe_kl_gradient(target: TRLProbeTarget, name: str) -> ProbeResult:
    """Compare the KL part of the loss gradient with the gradient promised by its name."""
    zero_advantage_batch = {
        **target.batch,
        "advantages": torch.zeros_like(target.batch["advantages"]),
    }
    measured = _loss_gradient(target, zero_advantage_batch, coef=1.0) - _loss_gradient(
        target, zero_advantage_batch, coef=0.0
    )
    promised = _promised_gradient(target, name)
    if all(all_gather_json(target.processes, is_expected_gradient(measured, promised))):
        return {**compare_gradients(measured, promised), "score_norm": None, "looks_like": name}
    candidates = {
        key: _promised_gradient(target, key) for key in sorted({*LIKELY_ESTIMATORS, name})
    }
    similarity = {key: abs(cosine_similarity(measured, v)) for key, v in candidates.items()}
    return {
        **compare_gradients(measured, promised),
        "score_norm": vector_norm(candidates["k1"]),
        "looks_like": max(similarity, key=lambda key: similarity[key]),
    }


def _has_plain_gradient(target: TRLProbeTarget, logp: Tensor) -> bool:
    """Whether the ratio is 1 on every token and no token is left out or weighted."""
    mask, old = trained_mask(target.batch), target.batch.get("old_per_token_logps")
    is_new = old is None or float((logp - old)[mask].abs().max()) < MAX_LOG_RATIO
    return (
        is_new
        and target.trainer.loss_type in SUPPORTED_LOSSES
        and target.batch.get("importance_sampling_ratio") is None
        and getattr(target.trainer, "top_entropy_quantile", 1.0) == 1.0
        and max_dropout_rate(target.model) == 0
    )


def _probe_policy_gradient(target: TRLProbeTarget) -> ProbeResult:
    """Compare the part of the gradient that depends on the advantages with its direction.

    The KL term, at its own coefficient, cancels: a loss may take another path at 0.
    """
    advantages = target.batch["advantages"]
    without = {**target.batch, "advantages": torch.zeros_like(advantages)}
    measured = _loss_gradient(target, target.batch) - _loss_gradient(target, without)
    with without_side_effects(target.trainer):
        logp = score_completions(target.score, target.model, target.batch)
        weights = token_weights(target.trainer, target.batch, logp.dtype)
        by_token = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        expected = _sampled_gradient(target, -(weights * by_token * logp).sum())
    return compare_gradients(measured, expected)


def _probe_micro_batches(target: TRLProbeTarget) -> ProbeResult:
    """Compare the gradient with that of the same rows in micro-batches of half the size."""
    whole = _loss_gradient(target, target.batch)
    half_size = len(target.batch["completion_ids"]) // 2
    halves = (range(half_size), range(half_size, 2 * half_size))
    with _double_micro_batches(target.trainer):
        parts = [_loss_gradient(target, select_rows(target.batch, list(rows))) for rows in halves]
    return compare_gradients(parts[0] + parts[1], whole)


@contextmanager
def _double_micro_batches(trainer: Any) -> Iterator[None]:
    """Double the trainer's micro-batches per step and per generation inside the context."""
    previous = trainer.current_gradient_accumulation_steps, trainer.args.steps_per_generation
    trainer.current_gradient_accumulation_steps = 2 * previous[0]
    trainer.args.steps_per_generation = 2 * previous[1]
    try:
        yield
    finally:
        trainer.current_gradient_accumulation_steps, trainer.args.steps_per_generation = previous


def _loss_gradient(target: TRLProbeTarget, batch: Batch, *, coef: float | None = None) -> Tensor:
    with (
        without_side_effects(target.trainer),
        nullcontext() if coef is None else target.override_coef(coef),
    ):
        return _sampled_gradient(target, target.loss(target.model, batch))


def _promised_gradient(target: TRLProbeTarget, name: str) -> Tensor:
    """Return the gradient of the named term, from `maths` and the token weights."""
    with without_side_effects(target.trainer):
        logp = score_completions(target.score, target.model, target.batch)
        weights = token_weights(target.trainer, target.batch, logp.dtype)
        inputs = kl_inputs(logp, target.batch, uses_sampler_logp=target.uses_sampler_logp)
        terms = ESTIMATORS[name].term(inputs.zero_outside_mask())
        return _sampled_gradient(target, (terms * weights[trained_mask(target.batch)]).sum())


def _sampled_gradient(target: TRLProbeTarget, loss: Tensor) -> Tensor:
    """Return evenly spaced entries of the gradient; 0 for unused parameters."""
    return sampled_entries(loss_gradients(target.trainer, target.model, loss))
