"""Per-token results of a step as record columns, and metrics derived from them."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klinic.evidence.record import StepRecord
from klinic.learner.objective import Parts, Targets
from klinic.learner.packing import MicroBatch, joined
from klinic.learner.team import Team
from klinic.learner.update import norm
from klinic.maths import kl
from klinic.model.scorer import RefHidden
from klinic.model.token_scores import TokenScores
from klinic.model.weights import whole


def first_of_groups(
    record: StepRecord, batch: MicroBatch, hidden: RefHidden | None
) -> RefHidden | None:
    """Select the reference's hidden states of the first completion of each group, as a sample."""
    if hidden is None or record.sample is None:
        return None
    lengths = np.diff(record.row_offsets)[batch.rows]
    chosen = np.repeat(record.sample[batch.rows] == 0, lengths)
    return hidden.at(np.flatnonzero(chosen))


def detached_parts(parts: Parts) -> Parts:
    """Return the loss terms of a micro-batch detached from the graph."""
    kl = None if parts.kl is None else parts.kl.detach()
    return replace(parts, policy=parts.policy.detach(), kl=kl)


def completed(
    record: StepRecord,
    targets: Targets,
    found: list[TokenScores],
    batches: list[MicroBatch],
    team: Team,
) -> StepRecord:
    """Return the record with the learner's per-token results."""

    def column(name: str) -> Any:
        values = [getattr(scores, name) for scores in found]
        if values[0] is None:
            return None
        return joined(values, batches, record.num_tokens, team).cpu().numpy()

    def array(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.cpu().numpy()

    logp = column("logp")
    logp_ref = column("logp_ref")
    return replace(
        record,
        logp=logp,
        logp_old=logp if targets.logp_old is None else array(targets.logp_old),
        logp_ref=array(targets.logp_ref) if logp_ref is None else logp_ref,
        entropy=column("entropy"),
        rank=column("rank"),
        kl_exact=column("kl_exact"),
    )


def finite_at(record: StepRecord, *, loss: float, grad_norm: float) -> dict[str, bool]:
    """Return for each site whether its values are finite.

    A non-finite value at an untrained token counts only if it reached the loss.
    """
    reached = not (np.isfinite(loss) and np.isfinite(grad_norm))
    looked = np.full(record.num_tokens, reached) | record.loss_mask

    def finite(values: np.ndarray | None) -> bool:
        return values is None or bool(np.isfinite(values[looked]).all())

    return {
        "logits": finite(record.entropy),
        "logp": finite(record.logp) and finite(record.logp_old),
        "logp_ref": finite(record.logp_ref),
        "loss": bool(np.isfinite(loss)),
        "gradient": bool(np.isfinite(grad_norm)),
    }


def kl_to_start(record: StepRecord, logp_start: Tensor | None) -> dict[str, float]:
    """Return k3 of the policy against the initial policy, averaged over trained tokens."""
    if logp_start is None or record.logp_old is None or not record.loss_mask.any():
        return {}
    start = logp_start.cpu().numpy().astype(np.float64)
    k3 = kl.k3(logp_p=record.logp_old.astype(np.float64), logp_q=start)
    return {"kl_to_start": float(k3[record.loss_mask].mean())}


def denominator(weights: Tensor) -> float:
    """Return the effective divisor of the summed loss: 1 / mean weight of a trained token."""
    used = weights[weights != 0]
    return float(len(used) / used.sum()) if len(used) else 0.0


@torch.no_grad()
def moved(before: list[Tensor], after: list[Tensor]) -> dict[str, float]:
    """Return the norm of an update, and the fraction of parameters that it left unchanged."""
    total = sum(p.numel() for p in after)
    unchanged = sum(int(whole((a == b).sum())) for a, b in zip(before, after, strict=True))
    return {
        "update_norm": norm([b - a for a, b in zip(before, after, strict=True)]),
        "unchanged_share": unchanged / max(total, 1),
    }
