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
    _get_tool_suffix_ids                  the template and content tokens of tool results
    train                                 an exception that ends the training

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

from klinic.evidence.processes import Processes
from klinic.integrations.trl.capabilities import has_method
from klinic.integrations.trl.kl_term import KlinicKLTerm
from klinic.integrations.trl.reference import TRLReference, unwrap_policy
from klinic.integrations.trl.rollouts import (
    GenerationBatch,
    RewardBatch,
    SamplerOutput,
    VLLMRecorder,
    build_generation_batch,
    build_reward_batch,
    find_groups,
)
from klinic.integrations.trl.sampled_logprobs import LogitsRecorder, record_generations
from klinic.integrations.trl.scoring import LOGP_REF_COLUMN, without_side_effects
from klinic.integrations.trl.tool_suffixes import ToolSuffixes
from klinic.integrations.trl.trained_rows import ROW_COLUMN, MicroBatch
from klinic.model.adapters import has_adapter
from klinic.model.weights import fingerprint, sampled_digest, trainable_tensors
from klinic.rewards.answer_pay import count_paid_answers


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
        processes: Processes,
    ) -> None:
        self._trainer = trainer
        self._processes = processes
        self._reference = reference
        self._kl_term = kl_term
        self._monitor_every = monitor_every
        self._wrappers = MethodWrappers()
        self._begin_step: StepCallback | None = None
        self._in_loss = False
        self._forward_outputs: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._logp_with_grad: torch.Tensor | None = None
        self._vllm_recorder: VLLMRecorder | None = None
        self._tool_suffixes = ToolSuffixes()
        self.generation: GenerationBatch | None = None
        """The last generation."""
        self.rewards: RewardBatch | None = None
        self.micro_batches: list[MicroBatch] = []
        """The batches of this step so far."""
        self._answer_counts: dict[str, int] = {}
        self.grad_norm: float | None = None
        self.seconds: dict[str, float] = {}

    def wrap_methods(self, begin_step: StepCallback, train: Callable[..., Any]) -> None:
        """Wrap every method; `begin_step` runs before the first loss of each step."""
        self._begin_step = begin_step
        wrap, trainer = self._wrappers.wrap_method, self._trainer
        wrap(trainer, "train", train)
        wrap(trainer, "_generate", self._on_generate)
        wrap(trainer, "_calculate_rewards", self._on_rewards)
        wrap(trainer, "_generate_and_score_completions", self._on_batch)
        self.score = wrap(trainer, "_get_per_token_logps_and_entropies", self._on_score)
        self._trl_loss = wrap(trainer, "_compute_loss", self._on_loss)
        wrap(trainer.accelerator, "clip_grad_norm_", self._on_norm)
        if has_method(trainer, "_load_optimizer_and_scheduler"):
            wrap(trainer, "_load_optimizer_and_scheduler", self._on_load)
        if has_method(trainer, "_get_tool_suffix_ids") and getattr(trainer, "tools", None):
            wrap(trainer, "_get_tool_suffix_ids", self._tool_suffixes.record_suffix)
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

    def first_unseen_method(self) -> str:
        """Return the first method of a step that was not called, in the order of TRL's calls."""
        if self.generation is None:
            return "TRL's _generate"
        if self.rewards is None:
            return "TRL's _calculate_rewards"
        return "TRL's _compute_loss, or its _get_per_token_logps_and_entropies within it"

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
        self._vllm_recorder = VLLMRecorder() if self._trainer.use_vllm else None
        self._tool_suffixes.clear()
        with record_generations() as recorders:
            generated = real(*args, **kwargs)
        if self._is_training:
            with self.add_seconds("klinic"):
                self.generation = build_generation_batch(generated, self._sampler_output(recorders))
        return generated

    def _sampler_output(self, recorders: list[LogitsRecorder]) -> SamplerOutput:
        trainer, vllm, lm = self._trainer, self._vllm_recorder, unwrap_policy(self._trainer)
        eos_ids = trainer.eos_token_ids
        emissions = [emission for call in recorders for emission in call.emissions(eos_ids)]
        return SamplerOutput(
            emissions=emissions + ([] if vllm is None else vllm.emissions(eos_ids)),
            cached_tokens=None if vllm is None else vllm.cached_tokens,
            pad_id=trainer._tokenizer.pad_token_id,
            suffixes=self._tool_suffixes,
            is_unwatched=trainer.use_vllm
            or getattr(trainer, "use_transformers_continuous_batching", False),
            version=self.current_step - 1,
            fingerprint=fingerprint(lm),
            loaded_fingerprint=_copy_fingerprint(lm, [call.model for call in recorders]),
        )

    def _on_vllm(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = real(*args, **kwargs)
        if self._vllm_recorder is not None:
            self._vllm_recorder.prompts.append(
                kwargs["prompts"] if "prompts" in kwargs else args[0]
            )
            self._vllm_recorder.completions.append(outputs[1])
        return outputs

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
            values = rewards.detach().cpu().numpy()  # of all processes
            asked = [row.get("prompt") for row in inputs]
            size = self._trainer.num_generations
            groups = find_groups(asked, prompts, size, self._processes)
            self.rewards = build_reward_batch(
                values,
                self._trainer.reward_func_names,
                self._trainer.reward_weights.cpu().numpy(),
                prompts,
                groups,
            )
            self._count_answers(inputs, values[groups.own], self.rewards.group)
        return rewards

    def _count_answers(self, rows: Any, rewards: Any, group: Any) -> None:
        """Add the counts of paid answers; a step may grade several generations."""
        if self.generation is None or len(self.generation.texts) != len(rows):
            return
        with self.add_seconds("klinic"):
            counts = count_paid_answers(
                rows, self.generation.texts, rewards, self._trainer.reward_funcs, group
            )
        for name, num in counts.items():
            self._answer_counts[name] = self._answer_counts.get(name, 0) + num

    def take_answer_counts(self) -> dict[str, int]:
        """Return the counts of paid answers since the last call."""
        taken, self._answer_counts = self._answer_counts, {}
        return taken

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
        self.grad_norm = None if grad_norm is None else float(grad_norm)
        return grad_norm

    def _on_load(self, real: Any, checkpoint: str | None) -> None:
        real(checkpoint)
        if self._kl_term is not None and checkpoint is not None:
            self._kl_term.load_state(Path(checkpoint))


def _copy_fingerprint(policy: Any, samplers: list[Any]) -> str | None:
    """Return the fingerprint of the trained weights in the first sampler that is no policy object.

    None if the policy sampled, or if the tensors are not comparable: merged, cast or quantized.
    """
    base = policy.get_base_model() if has_adapter(policy) else policy
    copies = [model for model in samplers if model is not base]
    if not copies:
        return None
    sampled = dict(copies[0].named_parameters())
    names = {id(weight): name for name, weight in base.named_parameters()}
    pairs = {
        name: (weight, sampled.get(names.get(id(weight), "")))
        for name, weight in trainable_tensors(policy).items()
    }
    copied = {
        name: copy
        for name, (weight, copy) in pairs.items()
        if copy is not None and copy.shape == weight.shape and copy.dtype == weight.dtype
    }
    return sampled_digest(copied) if copied and len(copied) == len(pairs) else None
