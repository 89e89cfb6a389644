"""Guard around each update of a TRL run: learning rate, skip decision, unchanged weights."""

from typing import Any

import torch

from klinic.doctor.live import is_probe_due
from klinic.evidence.record import StepRecord
from klinic.integrations.trl.recovery import TRLRecovery, UpdateDecision, drop_gradients
from klinic.integrations.trl.reference import unwrap_policy
from klinic.integrations.trl.sharding import local_shard
from klinic.learner.update import tensors_finite
from klinic.model.weights import sample_entries, trainable_tensors
from klinic.recipe.sections import RecoverySection


class UpdateGuard:
    """Runs before and after every step of the optimizer."""

    def __init__(self, trainer: Any, recovery: RecoverySection | None) -> None:
        self._trainer = trainer
        self._recovery = None if recovery is None else TRLRecovery(recovery)
        self._decision = UpdateDecision()
        self._saved_rates: list[float] = []
        self._weights_before: dict[str, torch.Tensor] | None = None

    @property
    def can_skip(self) -> bool:
        """Whether recovery may skip an update."""
        return self._recovery is not None

    @property
    def learning_rate(self) -> float:
        """The learning rate of the current update."""
        return float(self._trainer.optimizer.param_groups[0]["lr"])

    def snapshot_weights(self, step: int) -> None:
        """Store a sample of the weights before the update of a probed step."""
        if is_probe_due(step):
            weights = trainable_tensors(unwrap_policy(self._trainer))
            self._weights_before = {
                name: sample_entries(local_shard(p)).clone() for name, p in weights.items()
            }

    def weights_finite(self) -> bool:
        """Whether all trained weights are finite."""
        weights = trainable_tensors(unwrap_policy(self._trainer))
        return tensors_finite([p.detach() for p in weights.values()])

    def judge_update(self, record: StepRecord, *, weights_finite: bool) -> UpdateDecision:
        """Decide whether to apply an update; `record` holds the rows of all processes."""
        assert self._recovery is not None  # noqa: S101 - called only with recovery
        return self._recovery.judge_update(record, weights_finite=weights_finite)

    def apply_decision(self, decision: UpdateDecision) -> None:
        """Skip the update or cut its learning rate, as recovery decided."""
        self._decision = decision
        optimizer = self._trainer.optimizer
        if self._decision.skip:
            drop_gradients(optimizer)
        if self._decision.lr_factor != 1:
            self._saved_rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] *= self._decision.lr_factor

    def unchanged_fraction(self) -> float | None:
        """Restore the learning rate; return the fraction of sampled weights left unchanged."""
        for group, rate in zip(
            self._trainer.optimizer.param_groups, self._saved_rates, strict=False
        ):
            group["lr"] = rate
        self._saved_rates = []
        weights_before, self._weights_before = self._weights_before, None
        if weights_before is None or self._decision.skip:
            return None
        weights = trainable_tensors(unwrap_policy(self._trainer))
        pairs = [
            (weights_before[name], sample_entries(local_shard(p))) for name, p in weights.items()
        ]
        same = sum(int((a == b).sum()) for a, b in pairs)
        return same / max(sum(a.numel() for a, _ in pairs), 1)

    def take_decision(self) -> UpdateDecision:
        """Return the decision about the finished step and reset it."""
        taken, self._decision = self._decision, UpdateDecision()
        return taken
