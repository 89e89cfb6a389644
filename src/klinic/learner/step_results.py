"""Per-token results of a step as record columns, and metrics derived from them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from klinic.evidence.merging import ONE_PROCESS, Merge
from klinic.evidence.record import StepRecord
from klinic.learner.objective import LossTargets, LossTerms
from klinic.learner.packing import MicroBatch
from klinic.learner.step_rows import StepRows
from klinic.learner.update import read_numbers, total_norm
from klinic.maths import kl
from klinic.model.scorer import RefHidden
from klinic.model.token_scores import TokenScores
from klinic.model.weights import full_tensor


def first_of_groups(
    record: StepRecord, batch: MicroBatch, hidden: RefHidden | None
) -> RefHidden | None:
    """Select the reference's hidden states of the first completion of each group, as a sample."""
    if hidden is None or record.sample is None:
        return None
    lengths = np.diff(record.row_offsets)[batch.rows]
    is_first = np.repeat(record.sample[batch.rows] == 0, lengths)
    return hidden.select_tokens(np.flatnonzero(is_first))


def detach_loss_terms(terms: LossTerms) -> LossTerms:
    """Return the loss terms of a micro-batch detached from the graph."""
    kl = None if terms.kl is None else terms.kl.detach()
    teacher = None if terms.teacher is None else terms.teacher.detach()
    return replace(terms, policy=terms.policy.detach(), kl=kl, teacher=teacher)


def complete_record(
    rows: StepRows, targets: LossTargets, scores_by_batch: list[TokenScores]
) -> tuple[StepRecord, np.ndarray]:
    """Return the record with the learner's per-token results, and the policy term's weights."""

    def token_column(name: str) -> Tensor | None:
        values = [getattr(scores, name) for scores in scores_by_batch]
        if values[0] is None:
            return None
        return rows.gather_tokens(values)

    columns = {name: token_column(name) for name in ("logp", "entropy", "rank", "kl_exact")}
    columns |= {
        "logp_old": targets.logp_old,
        "logp_ref": targets.logp_ref,
        "logp_teacher": targets.logp_teacher,
    }
    arrays = _copy_to_host(columns | {"policy_weight": targets.policy_weight})
    if targets.logp_old is None:
        arrays["logp_old"] = arrays["logp"]
    policy_weight = arrays.pop("policy_weight")
    return replace(rows.record, **arrays), policy_weight


def _copy_to_host(columns: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """Return tensors as arrays, with one copy of all their bytes: the host waits for each copy."""
    arrays: dict[str, Any] = dict.fromkeys(columns)
    given = {name: c.detach().contiguous() for name, c in columns.items() if c is not None}
    whole = torch.cat([column.view(torch.uint8) for column in given.values()]).cpu()
    parts = torch.split(whole, [column.nbytes for column in given.values()])
    for (name, column), part in zip(given.items(), parts, strict=True):
        arrays[name] = part.clone().view(column.dtype).numpy()  # aligned for its dtype
    return arrays


def finite_at(
    record: StepRecord, *, loss: float, grad_norm: float, merge: Merge = ONE_PROCESS
) -> dict[str, bool]:
    """Return for each site whether its values are finite in every process.

    A non-finite value at an untrained token counts only if it reached the loss.
    """
    reached = not (np.isfinite(loss) and np.isfinite(grad_norm))

    def is_finite(values: np.ndarray | None) -> bool:
        if values is None or (finite := np.isfinite(values)).all():
            return True
        return not reached and bool(finite[record.loss_mask].all())

    sites = {
        "logits": is_finite(record.entropy),
        "logp": is_finite(record.logp) and is_finite(record.logp_old),
        "logp_ref": is_finite(record.logp_ref),
        **({} if record.logp_teacher is None else {"logp_teacher": is_finite(record.logp_teacher)}),
        "loss": bool(np.isfinite(loss)),
        "gradient": bool(np.isfinite(grad_norm)),
    }
    is_bad = merge.max(np.array([not finite for finite in sites.values()], np.float64))
    return dict(zip(sites, (is_bad == 0).tolist(), strict=True))


def kl_to_start(record: StepRecord, logp_start: Tensor | None) -> dict[str, float]:
    """Return k3 of the policy against the initial policy, averaged over trained tokens."""
    if logp_start is None or record.logp_old is None or not record.loss_mask.any():
        return {}
    start = logp_start.cpu().numpy().astype(np.float64)
    k3 = kl.k3(logp_p=record.logp_old.astype(np.float64), logp_q=start)
    return {"kl_to_start": float(k3[record.loss_mask].mean())}


def mean_over_trained(
    name: str, values: np.ndarray, record: StepRecord, merge: Merge = ONE_PROCESS
) -> dict[str, float]:
    """Return the mean over the trained tokens that have a value, as a metric of that name."""
    known = values[record.loss_mask & ~np.isnan(values)]
    total, num = merge.sum(np.array([known.sum(dtype=np.float64), known.size]))
    return {name: float(total / num)} if num else {}


def loss_denominator(policy_weight: np.ndarray, merge: Merge = ONE_PROCESS) -> float:
    """Return the effective divisor of the summed loss: 1 / mean weight of a trained token."""
    counts = [np.count_nonzero(policy_weight), policy_weight.sum(dtype=np.float64)]
    num_used, total = merge.sum(np.array(counts, np.float64))
    return float(num_used / total) if num_used else 0.0


@torch.no_grad()
def update_metrics(before: list[Tensor], after: list[Tensor]) -> dict[str, float]:
    """Return the norm of an update, and the fraction of parameters that it left unchanged."""
    total = sum(p.numel() for p in after)
    equal = [full_tensor((a == b).sum()) for a, b in zip(before, after, strict=True)]
    unchanged = sum(int(number) for number in read_numbers(equal))
    return {
        "update_norm": total_norm([b - a for a, b in zip(before, after, strict=True)]),
        "unchanged_share": unchanged / max(total, 1),
    }
