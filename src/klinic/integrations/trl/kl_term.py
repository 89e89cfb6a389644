"""Adds klinic's KL term to TRL's loss, which TRL computes at beta 0.

    loss = TRL's loss at beta 0 + kl_coef * sum_t w_t kl_t

The weights w are those of TRL's own term (`token_weights.py`). The value of the term is always k3;
only the gradient is the estimator's, whose own value may be meaningless.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from klinic.errors import ConfigError
from klinic.evidence.metrics import mean_k1
from klinic.evidence.record import StepRecord
from klinic.integrations.trl.describe import estimator_name, loss_name
from klinic.integrations.trl.scoring import Batch, kl_inputs, trained_on
from klinic.integrations.trl.token_weights import KNOWN, token_weights
from klinic.learner.objective import WHOLE_VOCABULARY
from klinic.loop.kl_control import adapted
from klinic.maths import kl
from klinic.maths.kl_coef import KLCoefState, linear_warmup
from klinic.maths.kl_estimators import kl_term
from klinic.maths.surrogate import SURROGATES
from klinic.recipe.kl import KLSection


class TRLTerm:
    """TRL's own KL term, as configured by its arguments, with beta as its coefficient."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def name(self) -> str | None:
        """klinic's name of the estimator; None at beta 0."""
        return estimator_name(self._trainer.args)

    @property
    def coef(self) -> float:
        """The coefficient."""
        return float(self._trainer.beta)

    @contextmanager
    def held(self, coef: float) -> Iterator[None]:
        """Override the coefficient inside the context."""
        before, self._trainer.beta = self._trainer.beta, coef
        try:
            yield
        finally:
            self._trainer.beta = before


class KLTerm:
    """klinic's KL term with its coefficient, which a controller may adapt."""

    def __init__(self, trainer: Any, section: KLSection) -> None:
        _refuse(trainer, section)
        self.section = section
        self._trainer = trainer
        self._state = KLCoefState(coef=section.coef)
        self._done = 0
        self._held: float | None = None

    @property
    def name(self) -> str:
        """The estimator."""
        return str(self.section.estimator)

    @property
    def coef(self) -> float:
        """The coefficient of the current step."""
        if self._held is not None:
            return self._held
        return linear_warmup(
            self._state.coef, step=self._done, warmup_steps=self.section.warmup_steps
        )

    @contextmanager
    def held(self, coef: float) -> Iterator[None]:
        """Override the coefficient inside the context."""
        before, self._held = self._held, coef
        try:
            yield
        finally:
            self._held = before

    def alone(self) -> AbstractContextManager[None]:
        """Disable TRL's own term inside the context."""
        return TRLTerm(self._trainer).held(0.0)

    def add(self, loss: Tensor, logp: Tensor, batch: Batch) -> Tensor:
        """Return the loss plus the KL term; `logp` carries the gradient."""
        if not self.coef:
            return loss
        inputs = kl_inputs(logp, batch)
        weights = token_weights(self._trainer, batch, logp.dtype)[trained_on(batch)]
        known = SURROGATES.get(loss_name(self._trainer.args))
        how = "token_mean" if known is None else known.aggregation
        term: Tensor = (weights * kl_term(self.section.estimator, inputs, aggregation=how)).sum()
        with torch.no_grad():
            shown: Tensor = (weights * kl.k3(**inputs.policy_and_ref)).sum()
        return loss + self.coef * (term - term.detach() + shown)

    def adapt(self, record: StepRecord) -> None:
        """Adapt the coefficient to the measured KL of a step."""
        after = adapted(self.section, self._state, mean_k1(record), done_steps=self._done)
        self._state = self._state if after is None else after
        self._done += 1


def _refuse(trainer: Any, section: KLSection) -> None:
    if section.estimator in WHOLE_VOCABULARY:
        raise ConfigError(
            f"KL(estimator) is {section.estimator}: it needs the log-probs of the whole "
            "vocabulary, and TRL's scoring returns those of the tokens alone. Use unbiased, which "
            "has the same expected gradient as exact."
        )
    if section.rollout_limit is not None:
        raise ConfigError(
            "KL(rollout_limit) drops completions before the update, which TRL does not support. "
            "Remove it, or train with klinic."
        )
    if trainer.loss_type not in KNOWN:
        raise ConfigError(
            f"loss_type is {trainer.loss_type}, whose token weights klinic does not know. Use one "
            f"of {', '.join(KNOWN)}."
        )
