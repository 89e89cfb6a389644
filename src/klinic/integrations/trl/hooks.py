"""Wraps methods of a TRL GRPOTrainer and captures data from each.

    wrapped method                        captured data
    _generate                             token ids, their emitter, the sampler's log-probs
    vllm_generation.generate, .llm        prompts sent to vLLM, and its cached token counts
    _calculate_rewards                    rewards by function, groups of rows
    _generate_and_score_completions       adds a column of row numbers; monitored log-probs
    _get_per_token_logps_and_entropies    log-probs and entropy of the training forward pass
    _compute_loss                         the batch and its loss; probes run before it
    accelerator.clip_grad_norm_           the gradient norm
    _load_optimizer_and_scheduler         the checkpoint to resume: restores the KL controller

Captured tensors are detached, extra computation restores the RNG state, and nothing is changed in
place: training is bit-identical to a run without klinic.

`MethodWrappers` wraps methods of live objects, and restores them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from klinic.integrations.trl.kl_term import KlinicKLTerm
from klinic.integrations.trl.records import ROW_COLUMN, MicroBatch
from klinic.integrations.trl.reference import TRLReference, unwrap_policy
from klinic.integrations.trl.rollouts import (
    GenerationBatch,
    RewardBatch,
    VLLMRecorder,
    build_generation_batch,
    build_reward_batch,
)
from klinic.integrations.trl.sampled_logprobs import record_logits
from klinic.integrations.trl.scoring import LOGP_REF_COLUMN, without_side_effects
from klinic.model.adapters import has_adapter
from klinic.model.weights import fingerprint


class MethodWrappers:
    """Wrapped methods of live objects, with the originals for `restore_methods`."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def wrap_method(self, owner: Any, name: str, change: Callable[..., Any]) -> Any:
        """Replace a method by `change(real, *args, **kwargs)`; return the real one."""
        real = getattr(owner, name)

        def call_wrapped(*args: Any, **kwargs: Any) -> Any:
            return change(real, *args, **kwargs)

        attributes = vars(owner)
        self._originals.append((owner, name, attributes.get(name)))
        attributes[name] = call_wrapped
        return real

    def restore_methods(self) -> None:
        """Restore every wrapped method, the last first."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = original


StepCallback = Callable[[Any, Any], None]
"""Called with the model and the first batch of a step, before its loss."""


class TrainerHooks:
    """Data of the current step, captured by the wrapped methods until `restore_methods`."""

    def __init__(
        self,
        trainer: Any,
        reference: TRLReference | None,
        kl_term: KlinicKLTerm | None,
        *,
        monitor_every: int,
    ) -> None:
        self._trainer = trainer
        self._reference = reference
        self._kl_term = kl_term
        self._monitor_every = monitor_every
        self._wrappers = MethodWrappers()
        self._begin_step: StepCallback | None = None
        self._in_loss = False
        self._forward_outputs: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._logp_with_grad: torch.Tensor | None = None
        self._vllm_recorder: VLLMRecorder | None = None
        self.generation: GenerationBatch | None = None
        """The last generation."""
        self.rewards: RewardBatch | None = None
        self.micro_batches: list[MicroBatch] = []
        """The batches of this step so far."""
        self.grad_norm: float | None = None
        self.seconds: dict[str, float] = {}

    def wrap_methods(self, begin_step: StepCallback) -> None:
        """Wrap every method; `begin` runs before the first loss of each step."""
        self._begin_step = begin_step
        wrap, trainer = self._wrappers.wrap_method, self._trainer
        wrap(trainer, "_generate", self._on_generate)
        wrap(trainer, "_calculate_rewards", self._on_rewards)
        wrap(trainer, "_generate_and_score_completions", self._on_batch)
        self.score = wrap(trainer, "_get_per_token_logps_and_entropies", self._on_score)
        self._trl_loss = wrap(trainer, "_compute_loss", self._on_loss)
        wrap(trainer.accelerator, "clip_grad_norm_", self._on_norm)
        wrap(trainer, "_load_optimizer_and_scheduler", self._on_load)
        if trainer.use_vllm:
            wrap(trainer.vllm_generation, "generate", self._on_vllm)
            if hasattr(trainer.vllm_generation, "llm"):  # an in-process engine
                wrap(trainer.vllm_generation.llm, "generate", self._on_engine)

    def restore_methods(self) -> None:
        """Restore every wrapped method."""
        self._wrappers.restore_methods()

    def take_batches(self) -> list[MicroBatch]:
        """Return the batches of the finished step and clear them."""
        taken, self.micro_batches = self.micro_batches, []
        return taken

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of klinic's own work since the last call, by name."""
        taken, self.seconds = self.seconds, {}
        return taken

    @contextmanager
    def add_seconds(self, name: str) -> Iterator[None]:
        """Add the elapsed time to the seconds under a name."""
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    @property
    def current_step(self) -> int:
        """The current update, counted from 1."""
        return int(self._trainer.state.global_step) + 1

    @property
    def _is_training(self) -> bool:
        return bool(self._trainer.model.training)

    def full_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        """Return TRL's loss, with klinic's KL term instead of TRL's if there is one."""
        self._in_loss = True
        try:
            if self._kl_term is None:
                return self._trl_loss(model, inputs)  # type: ignore[no-any-return]
            with self._kl_term.disable_trl_term():
                loss = self._trl_loss(model, inputs)
        finally:
            self._in_loss = False
        logp, self._logp_with_grad = self._logp_with_grad, None
        assert logp is not None  # noqa: S101 - TRL's loss scores its batch
        return self._kl_term.add_to_loss(loss, logp, inputs)

    def _on_generate(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        lm = unwrap_policy(self._trainer)
        self._vllm_recorder = VLLMRecorder() if self._trainer.use_vllm else None
        with record_logits(lm.get_base_model() if has_adapter(lm) else lm) as recorder:
            generated = real(*args, **kwargs)
        if self._is_training:
            with self.add_seconds("klinic"):
                self.generation = build_generation_batch(
                    generated,
                    recorder,
                    self._vllm_recorder,
                    pad_id=self._trainer._tokenizer.pad_token_id,
                    version=self.current_step - 1,
                    fingerprint=fingerprint(lm),
                )
        return generated

    def _on_vllm(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        if self._vllm_recorder is not None:
            self._vllm_recorder.prompts.append(
                kwargs["prompts"] if "prompts" in kwargs else args[0]
            )
        return real(*args, **kwargs)

    def _on_engine(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = real(*args, **kwargs)
        if self._vllm_recorder is not None:
            self._vllm_recorder.record_outputs(outputs)
        return outputs

    def _on_rewards(
        self, real: Any, inputs: Any, prompts: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        rewards: torch.Tensor = real(inputs, prompts, *args, **kwargs)
        if self._is_training:
            self.rewards = build_reward_batch(
                rewards.detach().cpu().numpy(),
                self._trainer.reward_func_names,
                self._trainer.reward_weights.cpu().numpy(),
                prompts,
                self._trainer.num_generations,
            )
        return rewards

    def _on_batch(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        batch = real(*args, **kwargs)
        if not self._is_training:
            return batch
        rows = torch.arange(len(batch["completion_ids"]), device=batch["completion_ids"].device)
        batch = {**batch, ROW_COLUMN: rows}
        is_monitored = self._monitor_every and (self.current_step - 1) % self._monitor_every == 0
        if is_monitored and self._reference is not None and self._trainer.beta == 0:
            with self.add_seconds("klinic_monitor"), without_side_effects(self._trainer):
                size = self._trainer.args.per_device_train_batch_size
                batch[LOGP_REF_COLUMN] = self._reference.completion_logp(
                    self.score, batch, size=size
                )
        return batch

    def _on_score(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = real(*args, **kwargs)
        if self._in_loss:
            logp, entropy = outputs[0], outputs[1]
            self._forward_outputs = logp.detach(), None if entropy is None else entropy.detach()
            self._logp_with_grad = logp
        return outputs

    def _on_loss(self, real: Any, model: Any, inputs: Any) -> Any:
        if not self._is_training or ROW_COLUMN not in inputs:
            return real(model, inputs)
        if not self.micro_batches and self._begin_step is not None:
            self.grad_norm = None
            with self.add_seconds("klinic"):
                self._begin_step(model, inputs)
        self._forward_outputs = None
        loss = self.full_loss(model, inputs)
        outputs = self._take_forward_outputs()
        if outputs is not None and self.generation is not None and self.rewards is not None:
            logp, entropy = outputs
            self.micro_batches.append(
                MicroBatch(
                    inputs=inputs,
                    logp=logp,
                    entropy=entropy,
                    loss=loss.detach(),
                    generation=self.generation,
                    rewards=self.rewards,
                )
            )
        return loss

    def _take_forward_outputs(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return the outputs of the last forward pass and clear them."""
        outputs, self._forward_outputs = self._forward_outputs, None
        return outputs

    def _on_norm(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        grad_norm = real(*args, **kwargs)
        self.grad_norm = float(grad_norm)
        return grad_norm

    def _on_load(self, real: Any, checkpoint: str | None) -> None:
        real(checkpoint)
        if self._kl_term is not None and checkpoint is not None:
            self._kl_term.load_state(Path(checkpoint))
