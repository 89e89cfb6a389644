"""Adds klinic's KL term to TRL's loss, which TRL computes at beta 0.

    loss = TRL's loss at beta 0 + kl_coef * sum_t w_t kl_t

The weights w are those of TRL's own term (`token_weights`). The value of the term is always k3;
only the gradient is the estimator's, whose own value may be meaningless.

    loss_type            weight of a trained token
    grpo, sapo           1 / (tokens of its row * rows * accumulation steps)
    bnpo                 1 / (tokens of the micro-batch * accumulation steps)
    dr_grpo              1 / (rows * max_completion_length * accumulation steps)
    luspo                1 / (rows * accumulation steps)
    dapo, cispo, vespo   1 / (tokens of the generation * accumulation steps / steps_per_generation)

Source: `GRPOTrainer._compute_loss` of TRL 1.16; tests compare both.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from klinic.errors import ConfigError
from klinic.evidence.metrics import mean_k1
from klinic.evidence.record import StepRecord
from klinic.integrations.trl.kl_checkpoint import KLCheckpoint, load_kl_state, save_kl_state
from klinic.integrations.trl.run_facts import estimator_name, loss_name
from klinic.integrations.trl.scoring import Batch, kl_inputs, trained_mask
from klinic.learner.objective import VOCABULARY_ESTIMATORS
from klinic.maths import kl
from klinic.maths.kl_coef import KLCoefState, linear_warmup
from klinic.maths.kl_estimators import kl_term
from klinic.maths.surrogate import SURROGATES
from klinic.recipe.sections import KLSection
from klinic.training.kl_control import update_kl_coef

GLOBAL_DENOMINATOR_LOSSES = ("dapo", "cispo", "vespo")
SUPPORTED_LOSSES = ("grpo", "sapo", "bnpo", "dr_grpo", "luspo", *GLOBAL_DENOMINATOR_LOSSES)


def token_weights(trainer: Any, batch: Batch, dtype: Any) -> Float[Tensor, "rows length"]:
    """Return the weights of a micro-batch, 0 outside the mask."""
    mask: Tensor = trained_mask(batch).to(dtype)
    rows, training = mask.size(0), trainer.model.training
    accumulation_steps = float(trainer.current_gradient_accumulation_steps) if training else 1.0
    match trainer.loss_type:
        case "grpo" | "sapo":
            return mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / rows / accumulation_steps
        case "bnpo":
            return mask / mask.sum().clamp(min=1.0) / accumulation_steps
        case "dr_grpo":
            return mask / (rows * int(trainer.max_completion_length)) / accumulation_steps
        case "luspo":
            return mask / rows / accumulation_steps
    generation_fraction = (
        accumulation_steps / trainer.args.steps_per_generation if training else 1.0
    )
    tokens: Tensor = batch["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    return mask / (tokens * generation_fraction)


class TRLKLTerm:
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
    def override_coef(self, coef: float) -> Iterator[None]:
        """Override the coefficient inside the context."""
        previous, self._trainer.beta = self._trainer.beta, coef
        try:
            yield
        finally:
            self._trainer.beta = previous


class KlinicKLTerm:
    """klinic's KL term with its coefficient, which a controller may adapt."""

    def __init__(self, trainer: Any, section: KLSection) -> None:
        _reject_unsupported(trainer, section)
        self.section = section
        self._trainer = trainer
        self._state = KLCoefState(coef=section.coef)
        self._done_steps = 0
        self._coef_override: float | None = None

    @property
    def name(self) -> str:
        """The estimator."""
        return str(self.section.estimator)

    @property
    def coef(self) -> float:
        """The coefficient of the current step."""
        if self._coef_override is not None:
            return self._coef_override
        return linear_warmup(
            self._state.coef, step=self._done_steps, warmup_steps=self.section.warmup_steps
        )

    @contextmanager
    def override_coef(self, coef: float) -> Iterator[None]:
        """Override the coefficient inside the context."""
        previous, self._coef_override = self._coef_override, coef
        try:
            yield
        finally:
            self._coef_override = previous

    def disable_trl_term(self) -> AbstractContextManager[None]:
        """Disable TRL's own term inside the context."""
        return TRLKLTerm(self._trainer).override_coef(0.0)

    def add_to_loss(self, loss: Tensor, logp: Tensor, batch: Batch) -> Tensor:
        """Return the loss plus the KL term; `logp` carries the gradient."""
        if not self.coef:
            return loss
        inputs = kl_inputs(logp, batch)
        weights = token_weights(self._trainer, batch, logp.dtype)[trained_mask(batch)]
        surrogate = SURROGATES.get(loss_name(self._trainer.args))
        aggregation = "token_mean" if surrogate is None else surrogate.aggregation
        term: Tensor = (
            weights * kl_term(self.section.estimator, inputs, aggregation=aggregation)
        ).sum()
        with torch.no_grad():
            value: Tensor = (weights * kl.k3(**inputs.policy_and_ref)).sum()
        return loss + self.coef * (term - term.detach() + value)

    def update_coef(self, record: StepRecord) -> None:
        """Adapt the coefficient to the measured KL of a step, once per generation."""
        # later updates on a generation measure the KL of the policy that sampled it once more
        if _has_new_generation(record):
            updated = update_kl_coef(
                self.section, self._state, mean_k1(record), done_steps=self._done_steps
            )
            self._state = self._state if updated is None else updated
        self._done_steps += 1

    def state(self) -> dict[str, Any]:
        """Return the controller's state as JSON values, for `adopt_state`."""
        return {"kl": self._state.to_json(), "done_steps": self._done_steps}

    def adopt_state(self, state: Mapping[str, Any]) -> None:
        """Take over the controller's state from another process."""
        self._state = KLCoefState.from_json(state["kl"])
        self._done_steps = int(state["done_steps"])

    def save_state(self, checkpoint: Path) -> None:
        """Save the controller in a checkpoint folder of TRL."""
        save_kl_state(checkpoint, KLCheckpoint(state=self._state, done_steps=self._done_steps))

    def load_state(self, checkpoint: Path) -> None:
        """Restore the controller from a checkpoint folder of TRL, if it has one."""
        saved = load_kl_state(checkpoint)
        if saved is not None:
            self._state, self._done_steps = saved.state, saved.done_steps

    def continue_from(self, step: int) -> bool:
        """Return whether the controller is that of a step; if not, count the steps from there."""
        is_restored = self._done_steps == step
        self._done_steps = step
        return is_restored


def _has_new_generation(record: StepRecord) -> bool:
    """Whether a step trains on completions that were sampled right before its update."""
    versions = record.weight_version
    return versions is None or bool((versions == record.step - 1).any())


def _reject_unsupported(trainer: Any, section: KLSection) -> None:
    if section.estimator in VOCABULARY_ESTIMATORS:
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
    if trainer.loss_type not in SUPPORTED_LOSSES:
        raise ConfigError(
            f"loss_type is {trainer.loss_type}, whose token weights klinic does not know. Use one "
            f"of {', '.join(SUPPORTED_LOSSES)}."
        )
