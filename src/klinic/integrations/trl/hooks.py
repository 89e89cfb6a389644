"""Wraps methods of a TRL GRPOTrainer and captures data from each.

    wrapped method                        captured data
    _generate                             token ids, their emitter, the sampler's log-probs
    vllm_generation.generate, .llm        prompts sent to vLLM, and its cached token counts
    _calculate_rewards                    rewards by function, groups of rows
    _generate_and_score_completions       adds a column of row numbers; monitored log-probs
    _get_per_token_logps_and_entropies    log-probs and entropy of the training forward pass
    _compute_loss                         the batch and its loss; probes run before it
    accelerator.clip_grad_norm_           the gradient norm

Captured tensors are detached, extra computation restores the RNG state, and nothing is changed in
place: training is bit-identical to a run without klinic.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from klinic.integrations.trl.drawn import Drawn, HeardOfVLLM, Rewarded, drawn, rewarded
from klinic.integrations.trl.generation import listening
from klinic.integrations.trl.kl_term import KLTerm
from klinic.integrations.trl.records import ROW, Trained
from klinic.integrations.trl.reference import Reference, policy_of
from klinic.integrations.trl.scoring import LOGP_REF, unseen
from klinic.integrations.trl.wrapping import Wrapped
from klinic.model.adapters import is_adapted
from klinic.model.weights import fingerprint

Begin = Callable[[Any, Any], None]
"""Called with the model and the first batch of a step, before its loss."""


class Hooks:
    """Data of the current step, captured by the wrapped methods until `restore_methods`."""

    def __init__(
        self, trainer: Any, reference: Reference | None, kl: KLTerm | None, *, watch_every: int
    ) -> None:
        self._trainer = trainer
        self._reference = reference
        self._kl = kl
        self._watch_every = watch_every
        self._wrapped = Wrapped()
        self._begin: Begin | None = None
        self._in_loss = False
        self._seen: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._graph: torch.Tensor | None = None
        self._vllm: HeardOfVLLM | None = None
        self.drawn: Drawn | None = None
        """The last generation."""
        self.rewarded: Rewarded | None = None
        self.trained: list[Trained] = []
        """The batches of this step so far."""
        self.grad_norm: float | None = None
        self.seconds: dict[str, float] = {}

    def wrap(self, begin: Begin) -> None:
        """Wrap every method; `begin` runs before the first loss of each step."""
        self._begin = begin
        wrap, trainer = self._wrapped.wrap, self._trainer
        wrap(trainer, "_generate", self._on_generate)
        wrap(trainer, "_calculate_rewards", self._on_rewards)
        wrap(trainer, "_generate_and_score_completions", self._on_batch)
        self.score = wrap(trainer, "_get_per_token_logps_and_entropies", self._on_score)
        self._loss = wrap(trainer, "_compute_loss", self._on_loss)
        wrap(trainer.accelerator, "clip_grad_norm_", self._on_norm)
        if trainer.use_vllm:
            wrap(trainer.vllm_generation, "generate", self._on_vllm)
            if hasattr(trainer.vllm_generation, "llm"):  # an in-process engine
                wrap(trainer.vllm_generation.llm, "generate", self._on_engine)

    def undo(self) -> None:
        """Restore every wrapped method."""
        self._wrapped.undo()

    def take_batches(self) -> list[Trained]:
        """Return the batches of the finished step and clear them."""
        taken, self.trained = self.trained, []
        return taken

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of klinic's own work since the last call, by name."""
        taken, self.seconds = self.seconds, {}
        return taken

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the elapsed time to the seconds under a name."""
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    @property
    def step(self) -> int:
        """The current update, counted from 1."""
        return int(self._trainer.state.global_step) + 1

    @property
    def _training(self) -> bool:
        return bool(self._trainer.model.training)

    def full_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        """Return TRL's loss, with klinic's KL term instead of TRL's if there is one."""
        self._in_loss = True
        try:
            if self._kl is None:
                return self._loss(model, inputs)  # type: ignore[no-any-return]
            with self._kl.alone():
                loss = self._loss(model, inputs)
        finally:
            self._in_loss = False
        graph, self._graph = self._graph, None
        assert graph is not None  # noqa: S101 - TRL's loss scores its batch
        return self._kl.add(loss, graph, inputs)

    def _on_generate(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        lm = policy_of(self._trainer)
        self._vllm = HeardOfVLLM() if self._trainer.use_vllm else None
        with listening(lm.get_base_model() if is_adapted(lm) else lm) as heard:
            generated = real(*args, **kwargs)
        if self._training:
            with self.timed("klinic"):
                self.drawn = drawn(
                    generated,
                    heard,
                    self._vllm,
                    pad_id=self._trainer._tokenizer.pad_token_id,
                    version=self.step - 1,
                    fingerprint=fingerprint(lm),
                )
        return generated

    def _on_vllm(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        if self._vllm is not None:
            self._vllm.prompts.append(kwargs["prompts"] if "prompts" in kwargs else args[0])
        return real(*args, **kwargs)

    def _on_engine(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = real(*args, **kwargs)
        if self._vllm is not None:
            self._vllm.told(outputs)
        return outputs

    def _on_rewards(
        self, real: Any, inputs: Any, prompts: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        found: torch.Tensor = real(inputs, prompts, *args, **kwargs)
        if self._training:
            self.rewarded = rewarded(
                found.detach().cpu().numpy(),
                self._trainer.reward_func_names,
                self._trainer.reward_weights.cpu().numpy(),
                prompts,
                self._trainer.num_generations,
            )
        return found

    def _on_batch(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        batch = real(*args, **kwargs)
        if not self._training:
            return batch
        rows = torch.arange(len(batch["completion_ids"]), device=batch["completion_ids"].device)
        batch = {**batch, ROW: rows}
        watched = self._watch_every and (self.step - 1) % self._watch_every == 0
        if watched and self._reference is not None and self._trainer.beta == 0:
            with self.timed("klinic_monitor"), unseen(self._trainer):
                size = self._trainer.args.per_device_train_batch_size
                batch[LOGP_REF] = self._reference.logp(self.score, batch, size=size)
        return batch

    def _on_score(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        if self._in_loss:
            logp, entropy = found[0], found[1]
            self._seen = logp.detach(), None if entropy is None else entropy.detach()
            self._graph = logp
        return found

    def _on_loss(self, real: Any, model: Any, inputs: Any) -> Any:
        if not self._training or ROW not in inputs:
            return real(model, inputs)
        if not self.trained and self._begin is not None:
            self.grad_norm = None
            with self.timed("klinic"):
                self._begin(model, inputs)
        self._seen = None
        loss = self.full_loss(model, inputs)
        seen = self._taken()
        if seen is not None and self.drawn is not None and self.rewarded is not None:
            logp, entropy = seen
            self.trained.append(
                Trained(
                    inputs=inputs,
                    logp=logp,
                    entropy=entropy,
                    loss=loss.detach(),
                    drawn=self.drawn,
                    rewarded=self.rewarded,
                )
            )
        return loss

    def _taken(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return the outputs of the last forward pass and clear them."""
        seen, self._seen = self._seen, None
        return seen

    def _on_norm(self, real: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        self.grad_norm = float(found)
        return found
