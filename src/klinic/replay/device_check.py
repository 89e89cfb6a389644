"""Compares a learner on an accelerator with a copy of it on the CPU, on the same batch.

Both score the same tokens and compute the gradient of the same loss. What remains is rounding; a
kernel that computes something else, or a tensor that went missing on the way, shows at once.
"""

import copy
import itertools
from dataclasses import dataclass

import numpy as np
import torch

from klinic.evidence.metrics import kl_metrics
from klinic.evidence.record import StepRecord
from klinic.learner.local import LocalLearner
from klinic.learner.protocol import LossScales
from klinic.model.attention import use_cpu_attention
from klinic.model.moving_reference import MovingReference

MAX_PARAMETERS = 2_000_000_000  # the copy takes 4 bytes each, and its pass runs on the CPU
LOGP_LIMITS = {"fp32": 1e-3, "bf16": 0.1}
"""Largest mean difference of log-probs, in nats."""
GRADIENT_LIMITS = {"fp32": 0.01, "bf16": 0.2}
"""Largest norm of the difference of gradients, relative to that of the CPU."""
KL_LIMITS = {"fp32": 1e-3, "bf16": 0.1}
"""Largest difference of the mean KL, in nats per token, and relative to a KL above 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceComparison:
    """Differences between the learner and its copy on the CPU."""

    dtype: str
    logp: float
    """Mean absolute difference of the trained tokens' log-probs, in nats."""
    logp_ref: float | None
    kl: float | None
    """Mean k3 of the trained tokens on the device, in nats."""
    kl_cpu: float | None
    gradient: float
    """Norm of the difference of gradients, relative to that of the CPU."""

    @property
    def ok(self) -> bool:
        """Whether the differences are those of rounding; a NaN never is."""
        limit = LOGP_LIMITS[self.dtype]
        is_ref_close = self.logp_ref is None or self.logp_ref <= limit
        is_close = self.logp <= limit and is_ref_close and self._is_kl_close
        return is_close and self.gradient <= GRADIENT_LIMITS[self.dtype]

    @property
    def _is_kl_close(self) -> bool:
        if self.kl is None or self.kl_cpu is None:
            return self.kl is self.kl_cpu
        return abs(self.kl - self.kl_cpu) <= KL_LIMITS[self.dtype] * max(1.0, self.kl_cpu)

    def describe(self) -> str:
        """Return the differences in one line."""
        reference = "" if self.logp_ref is None else f", of the reference {self.logp_ref:.1e}"
        if self.kl is not None and self.kl_cpu is not None:
            reference += f", the KL by {abs(self.kl - self.kl_cpu):.1e} (it is {self.kl_cpu:.1e})"
        return (
            f"log-probs differ from the CPU by {self.logp:.1e} nats{reference}, "
            f"the gradient by {self.gradient:.1e} of its norm"
        )


def compare_with_cpu(
    learner: LocalLearner, record: StepRecord, *, kl_coef: float, dtype: str
) -> DeviceComparison:
    """Score a batch and compute its gradient on the learner's device and on the CPU."""
    here = _score_and_differentiate(learner, record, kl_coef)
    there = _score_and_differentiate(_copy_to_cpu(learner), record, kl_coef)
    distance = (here.gradient - there.gradient).norm() / there.gradient.norm()
    return DeviceComparison(
        dtype=dtype,
        logp=float(np.abs(here.logp - there.logp).mean()),
        logp_ref=None
        if here.logp_ref is None or there.logp_ref is None
        else float(np.abs(here.logp_ref - there.logp_ref).mean()),
        kl=here.kl,
        kl_cpu=there.kl,
        gradient=float(distance),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Results:
    logp: np.ndarray
    logp_ref: np.ndarray | None
    kl: float | None
    gradient: torch.Tensor


def _score_and_differentiate(learner: LocalLearner, record: StepRecord, kl_coef: float) -> _Results:
    with_kl = kl_coef > 0 and learner.reference is not None
    scored = learner.score(record, needs_reference=with_kl)
    prepared = learner.prepare(scored, LossScales(kl_coef=kl_coef if with_kl else 0.0))
    gradients = [g.detach().flatten().cpu() for g in learner.current_gradients()]
    learner.discard()
    found, mask = prepared.record, record.loss_mask
    assert found.logp is not None  # noqa: S101 - the learner has scored it
    return _Results(
        logp=found.logp[mask],
        logp_ref=None if found.logp_ref is None else found.logp_ref[mask],
        kl=kl_metrics(found).get("kl"),
        gradient=torch.cat(gradients),
    )


def _copy_to_cpu(learner: LocalLearner) -> LocalLearner:
    """Return a learner with copies of policy and reference, which may share a model."""
    models = [learner.policy.lm]
    if learner.reference is not None:
        models.append(learner.reference.scorer.lm)
    if isinstance(learner.reference, MovingReference):
        models.append(learner.reference.start_reference.scorer.lm)
    tensors = {
        id(tensor): tensor
        for lm in models
        for tensor in itertools.chain(lm.parameters(), lm.buffers())
    }
    # the copies of all tensors are given, so that none is ever made on the device
    memo: dict[int, object] = {key: _host_copy(tensor) for key, tensor in tensors.items()}
    policy, reference = copy.deepcopy((learner.policy, learner.reference), memo)
    for scorer in (policy.scorer, *([] if reference is None else [reference.scorer])):
        use_cpu_attention(scorer.lm)
    return LocalLearner(policy, reference, objective=learner.objective, settings=learner.settings)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().cpu().clone()
    if not isinstance(tensor, torch.nn.Parameter):
        return copied
    return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
