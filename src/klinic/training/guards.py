"""Checks a step for anomalies while it runs, and aborts it with `StepAnomalyError`."""

from collections.abc import Mapping

import numpy as np

from klinic.doctor.anomalies import (
    Anomaly,
    AnomalyLimits,
    History,
    check_batch_reward,
    check_grad_norm,
    check_history,
    check_update_kl,
    non_finite,
    with_grad_norm,
    with_kl,
    with_reward,
)
from klinic.evidence.record import StepRecord
from klinic.learner.protocol import PreparedUpdate
from klinic.rewards.scores import nan_mean
from klinic.training.collect import RolloutBatch


class StepAnomalyError(Exception):
    """Raised when a step must be abandoned; `Run.recover` picks the action."""

    def __init__(
        self, anomaly: Anomaly, batch_indices: tuple[int, ...], metrics: dict[str, float]
    ) -> None:
        super().__init__(str(anomaly))
        self.anomaly = anomaly
        self.batch_indices = batch_indices
        """Indices of the batches of the step."""
        self.metrics = metrics
        """Metrics of the step so far."""


class StepGuard:
    """Anomaly checks of one step. Without limits recovery is disabled and nothing is raised."""

    def __init__(
        self,
        limits: AnomalyLimits | None,
        history: History,
        *,
        tolerated_sites: tuple[str, ...],
        expected_batch: int,
    ) -> None:
        self._limits = limits
        self._tolerated_sites = tolerated_sites
        self.history = history
        self.taken_batches: list[int] = []
        """Indices of the batches taken so far."""
        self._expected_batch = expected_batch
        self.metrics: dict[str, float] = {}
        self._num_updates = 0

    @property
    def update_kl_limit(self) -> float | None:
        """Largest KL(new || old) of the updates of a batch; None without a limit."""
        return None if self._limits is None else self._limits.update_kl

    @property
    def batch_indices(self) -> tuple[int, ...]:
        """Indices of the batches of the step: those taken, or the one expected next."""
        return tuple(self.taken_batches) or (self._expected_batch,)

    def check_state(self, finite: Mapping[str, bool]) -> None:
        """Check weights and optimizer moments before the step."""
        self._raise_anomaly(non_finite(finite, damaged=True))

    def report_logits(self) -> None:
        """Report non-finite logits in the sampler."""
        self._raise_anomaly(non_finite({"logits": False}))

    def check_rewards(self, batch: RolloutBatch, record: StepRecord) -> None:
        """Check rewards and advantages."""
        reward, advantage = record.reward, record.advantage
        sites = {"reward": not batch.scores.num_nonfinite}
        if reward is not None and advantage is not None:
            self.metrics["reward"] = nan_mean(reward)
            sites["advantage"] = bool(np.isfinite(advantage[~np.isnan(reward)]).all())
        self._raise_anomaly(non_finite(sites))

    def report_all_over_limit(self, sequence_kl: float, limit: float) -> None:
        """Report that every completion exceeds the KL limit, so none can be trained on."""
        self._raise_anomaly(
            Anomaly(kind="sequence KL", measured=sequence_kl, limit=limit, damaged=True)
        )

    def check_gradient(self, prepared: PreparedUpdate, step: int) -> None:
        """Check a gradient before it is applied."""
        self.metrics |= prepared.metrics
        damaged = self._num_updates > 0
        self._raise_anomaly(non_finite(prepared.finite_at, damaged=damaged))
        if self._limits is None:
            return
        grad_norm = prepared.metrics.get("grad_norm", 0.0)
        self._raise_anomaly(check_grad_norm(self._limits, self.history, grad_norm, damaged=damaged))
        if damaged:  # the checks of the batch ran before its first update
            return
        reward = self.metrics.get("reward")
        self._raise_anomaly(check_batch_reward(self._limits, self.history, reward))
        self.history = with_reward(self.history, step, reward)
        if self._limits.kl is not None:
            self.history = with_kl(self.history, prepared.mean_k1)
        self._raise_anomaly(check_history(self._limits, self.history))
        self.history = with_grad_norm(self.history, grad_norm)

    def count_update(self) -> None:
        """Count an applied update: from now on recovery must roll back."""
        self._num_updates += 1

    def check_update(self, finite: Mapping[str, bool], update_kl: float | None) -> None:
        """Check weights and KL after the updates of a batch."""
        self._raise_anomaly(non_finite(finite, damaged=True))
        if self._limits is not None:
            self._raise_anomaly(check_update_kl(self._limits, update_kl))

    def _raise_anomaly(self, anomaly: Anomaly | None) -> None:
        if anomaly is None or self._limits is None:
            return
        if not (anomaly.is_mild and anomaly.site in self._tolerated_sites):
            raise StepAnomalyError(anomaly, self.batch_indices, self.metrics)
