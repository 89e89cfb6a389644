"""Guard around each update of a TRL run: learning rate, skip decision, unchanged weights."""

from typing import Any

import torch

from klinic.evidence.record import StepRecord
from klinic.integrations.trl.recovering import Recovering, Verdict, drop_gradients
from klinic.integrations.trl.reference import policy_of
from klinic.learner.update import all_finite
from klinic.loop.asking import is_time
from klinic.model.weights import sampled, trained
from klinic.recipe.recovery import RecoverySection


class Updates:
    """Runs before and after every step of the optimizer."""

    def __init__(self, trainer: Any, recovery: RecoverySection | None) -> None:
        self._trainer = trainer
        self._recovering = None if recovery is None else Recovering(recovery)
        self._verdict = Verdict()
        self._rates: list[float] = []
        self._before: dict[str, torch.Tensor] | None = None

    @property
    def judges(self) -> bool:
        """Whether recovery may skip an update."""
        return self._recovering is not None

    @property
    def rate(self) -> float:
        """The learning rate of the current update."""
        return float(self._trainer.optimizer.param_groups[0]["lr"])

    def look(self, step: int) -> None:
        """Store a sample of the weights before the update of a probed step."""
        if is_time(step):
            weights = trained(policy_of(self._trainer))
            self._before = {name: sampled(p.detach()).clone() for name, p in weights.items()}

    def judge(self, record: StepRecord) -> str:
        """Skip the update or cut its learning rate, as recovery decides; return the reason."""
        assert self._recovering is not None  # noqa: S101 - called only with recovery
        sound = all_finite([p.detach() for p in trained(policy_of(self._trainer)).values()])
        self._verdict = self._recovering.judge(record, weights_sound=sound)
        optimizer = self._trainer.optimizer
        if self._verdict.skip:
            drop_gradients(optimizer)
        if self._verdict.lr_factor != 1:
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] *= self._verdict.lr_factor
        return self._verdict.says

    def look_again(self) -> float | None:
        """Restore the learning rate; return the fraction of sampled weights left unchanged."""
        for group, rate in zip(self._trainer.optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []
        before, self._before = self._before, None
        if before is None or self._verdict.skip:
            return None
        weights = trained(policy_of(self._trainer))
        pairs = [(before[name], sampled(p.detach())) for name, p in weights.items()]
        same = sum(int((a == b).sum()) for a, b in pairs)
        return same / max(sum(a.numel() for a, _ in pairs), 1)

    def take_verdict(self) -> Verdict:
        """Return the decision about the finished step and reset it."""
        taken, self._verdict = self._verdict, Verdict()
        return taken
