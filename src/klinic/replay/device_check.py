"""Compares a learner on an accelerator with a copy of it on the CPU, on the same batch.

Both score the same tokens and compute the gradient of the same loss. What remains is rounding; a
kernel that computes something else, or a tensor that went missing on the way, shows at once.
"""

import copy
from dataclasses import dataclass

import numpy as np
import torch

from klinic.evidence.record import StepRecord
from klinic.learner.local import LocalLearner
from klinic.learner.protocol import LossScales
from klinic.model.device import move_model

MAX_PARAMETERS = 2_000_000_000  # the copy takes 4 bytes each, and its pass runs on the CPU
LOGP_LIMITS = {"fp32": 1e-3, "bf16": 0.1}
"""Largest mean difference of log-probs, in nats."""
GRADIENT_LIMITS = {"fp32": 0.01, "bf16": 0.2}
"""Largest norm of the difference of gradients, relative to that of the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceComparison:
    """Differences between the learner and its copy on the CPU."""

    dtype: str
    logp: float
    """Mean absolute difference of the trained tokens' log-probs, in nats."""
    logp_ref: float | None
    gradient: float
    """Norm of the difference of gradients, relative to that of the CPU."""

    @property
    def ok(self) -> bool:
        """Whether the differences are those of rounding; a NaN never is."""
        limit = LOGP_LIMITS[self.dtype]
        is_ref_close = self.logp_ref is None or self.logp_ref <= limit
        return self.logp <= limit and is_ref_close and self.gradient <= GRADIENT_LIMITS[self.dtype]

    def describe(self) -> str:
        """Return the differences in one line."""
        reference = "" if self.logp_ref is None else f", of the reference {self.logp_ref:.1e}"
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
        gradient=float(distance),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Results:
    logp: np.ndarray
    logp_ref: np.ndarray | None
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
        gradient=torch.cat(gradients),
    )


def _copy_to_cpu(learner: LocalLearner) -> LocalLearner:
    """Return a learner with copies of policy and reference, which may share a model."""
    policy, reference = copy.deepcopy((learner.policy, learner.reference))
    models = [policy.lm] if reference is None else [policy.lm, reference.scorer.lm]
    for lm in models:
        move_model(lm, torch.device("cpu"))
    return LocalLearner(policy, reference, objective=learner.objective, settings=learner.settings)
