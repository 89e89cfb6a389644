"""Checks a step for anomalies while it runs, and aborts it with `StepAnomaly`."""

from collections.abc import Mapping

import numpy as np

from klinic.doctor.trouble import (
    History,
    Limits,
    Trouble,
    not_a_number,
    of_batch,
    of_gradient,
    of_policy,
    of_update,
    with_grad_norm,
    with_kl,
    with_reward,
)
from klinic.evidence.metrics import mean_k1
from klinic.evidence.record import StepRecord
from klinic.learner.protocol import Prepared
from klinic.loop.gather import Gathered
from klinic.rewards.scores import mean


class InTroubleError(Exception):
    """Raised when a step must be abandoned; `Run.recover` picks the action."""

    def __init__(
        self, trouble: Trouble, places: tuple[int, ...], metrics: dict[str, float]
    ) -> None:
        super().__init__(str(trouble))
        self.trouble = trouble
        self.places = places
        """Indices of the batches of the step."""
        self.metrics = metrics
        """Metrics of the step so far."""


class Watch:
    """Anomaly checks of one step. Without limits recovery is disabled and nothing is raised."""

    def __init__(
        self, limits: Limits | None, history: History, *, known: tuple[str, ...], place: int
    ) -> None:
        self._limits = limits
        self._known = known
        self.history = history
        self.drawn: list[int] = []
        """Indices of the batches taken so far."""
        self._expected = place
        self.metrics: dict[str, float] = {}
        self._committed = 0

    @property
    def places(self) -> tuple[int, ...]:
        """Indices of the batches of the step: those taken, or the one expected next."""
        return tuple(self.drawn) or (self._expected,)

    def held(self, finite: Mapping[str, bool]) -> None:
        """Check weights and optimizer moments before the step."""
        self._raise(not_a_number(finite, damaged=True))

    def logits(self) -> None:
        """Report non-finite logits in the sampler."""
        self._raise(not_a_number({"logits": False}))

    def judged(self, gathered: Gathered, record: StepRecord) -> None:
        """Check rewards and advantages."""
        reward, advantage = record.reward, record.advantage
        sites = {"reward": not gathered.scores.num_nonfinite}
        if reward is not None and advantage is not None:
            self.metrics["reward"] = mean(reward)
            sites["advantage"] = bool(np.isfinite(advantage[~np.isnan(reward)]).all())
        self._raise(not_a_number(sites))

    def all_too_far(self, sequence_kl: float, limit: float) -> None:
        """Report that every completion exceeds the KL limit, so none can be trained on."""
        self._raise(Trouble(kind="sequence KL", measured=sequence_kl, limit=limit, damaged=True))

    def prepared(self, prepared: Prepared, step: int) -> None:
        """Check a gradient before it is applied."""
        self.metrics |= prepared.metrics
        damaged = self._committed > 0
        self._raise(not_a_number(prepared.finite_at, damaged=damaged))
        if self._limits is None:
            return
        grad_norm = prepared.metrics.get("grad_norm", 0.0)
        self._raise(of_gradient(self._limits, self.history, grad_norm, damaged=damaged))
        if damaged:  # the checks of the batch ran before its first update
            return
        reward = self.metrics.get("reward")
        self._raise(of_batch(self._limits, self.history, reward))
        self.history = with_reward(self.history, step, reward)
        if self._limits.kl is not None:
            self.history = with_kl(self.history, mean_k1(prepared.record))
        self._raise(of_policy(self._limits, self.history))
        self.history = with_grad_norm(self.history, grad_norm)

    def committed(self) -> None:
        """Count an applied update: from now on recovery must roll back."""
        self._committed += 1

    def moved(self, finite: Mapping[str, bool], update_kl: float | None) -> None:
        """Check weights and KL after the updates of a batch."""
        self._raise(not_a_number(finite, damaged=True))
        if self._limits is not None:
            self._raise(of_update(self._limits, update_kl))

    def _raise(self, trouble: Trouble | None) -> None:
        if trouble is None or self._limits is None:
            return
        if not (trouble.is_mild and trouble.site in self._known):
            raise InTroubleError(trouble, self.places, self.metrics)
