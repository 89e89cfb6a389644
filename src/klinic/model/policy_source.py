"""The policy in training, as samplers with weights of their own need it."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int

from klinic.model.layout import pad_rows
from klinic.model.loading import Policy
from klinic.model.weight_stream import WeightStream
from klinic.model.weights import Weights, sampled_digest, trainable_tensors

PromptIds = Int[np.ndarray, "m"]
CompletionIds = Int[np.ndarray, "n"]


@runtime_checkable
class WeightSource(Protocol):
    """Streams the weights of the policy, and scores tokens that a sampler reports."""

    def publish(self) -> Weights:
        """Return the identity of the current weights."""

    def stream_weights(
        self, dtype: torch.dtype | None = None
    ) -> AbstractContextManager[WeightStream]:
        """Open a stream of the trained weights, which do not change until it is closed.

        `dtype` is that of the receiver; by default the weights keep theirs.
        """

    def completion_logits(
        self, prompt: PromptIds, token_ids: CompletionIds, *, adapter: bool = True
    ) -> Float[np.ndarray, "n V"]:
        """Return the logits of each token of a completion, before any temperature.

        Without `adapter` they are those of the base under the policy's adapter.
        """

    def hold_weights(self) -> AbstractContextManager[None]:
        """Let no other thread change the weights within the context."""


class PolicySource:
    """The source of a policy in this process, or of this rank's shards of one."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        # read once: while a sharded model is gathered, its parameters are other tensors
        self._trained = trainable_tensors(policy.lm)
        self._num_updates = 0
        self._weights_lock = threading.RLock()

    def publish(self) -> Weights:
        """Return the identity of the current weights."""
        return Weights(
            version=self._num_updates,
            fingerprint=sampled_digest(self._trained),
            location="process",
        )

    @contextmanager
    def hold_weights(self) -> Iterator[None]:
        """Let no other thread change the weights within the context."""
        with self._weights_lock:
            yield

    @contextmanager
    def stream_weights(self, dtype: torch.dtype | None = None) -> Iterator[WeightStream]:
        """Open a stream of the trained weights."""
        own_dtype = next(iter(self._trained.values())).dtype
        stream = WeightStream(self._trained, dtype=own_dtype if dtype is None else dtype)
        with self.hold_weights(), stream:
            yield stream

    @torch.no_grad()
    def completion_logits(
        self, prompt: PromptIds, token_ids: CompletionIds, *, adapter: bool = True
    ) -> Float[np.ndarray, "n V"]:
        """Return the logits of each token of a completion, before any temperature."""
        scorer = self.policy.scorer
        layout = pad_rows([prompt], [token_ids], pad_id=self.policy.pad_id, device=scorer.device)
        with nullcontext() if adapter else scorer.lm.disable_adapter():
            logits: np.ndarray = scorer.logits_of(scorer.hidden(layout)).cpu().numpy()
        return logits
