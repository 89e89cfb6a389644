"""Records the log-probs of tokens as transformers' `generate` samples them.

TRL takes only token ids from `generate`. A recording LogitsProcessorList captures the processed
scores that each token is sampled from, and reuses the softmax that `generate` computes of them.
The sampled token appears in the input ids of the next call. Only the scores of the last position
are stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softmax
from transformers import LogitsProcessorList

HOOK = "_get_logits_processor"
PRECISE = (torch.float32, torch.float64)


class Heard:
    """Records the sampling of one generation; of several, only their number is valid."""

    def __init__(self) -> None:
        self.num_generations = 0
        self.prompt_ids: Tensor | None = None
        """The input ids of `generate`, padded on the left."""
        self._drawn: list[Tensor] = []
        """Probabilities of the sampled tokens, one column per position; or the log-probs below."""
        self._logp: list[Tensor] = []
        self._scores: Tensor | None = None
        self._probs: Tensor | None = None

    def begin(self) -> None:
        """Reset the recorder for another generation."""
        self.num_generations += 1
        self.prompt_ids, self._scores, self._probs = None, None, None
        self._drawn.clear()
        self._logp.clear()

    def scores(self, input_ids: Tensor, scores: Tensor) -> None:
        """Record the scores of the next token; the input ids end with the last sampled token.

        Called at every position, without gradients.
        """
        if self.prompt_ids is None:
            self.prompt_ids = input_ids
        else:
            self._choose(input_ids[:, -1:])
        self._scores, self._probs = scores, None

    def probs(self, probs: Tensor) -> None:
        """Record the softmax of the last scores, computed by `generate`."""
        if self._scores is not None and probs.shape == self._scores.shape:
            self._probs = probs if probs.dtype in PRECISE else None

    def _choose(self, chosen: Tensor) -> None:
        assert self._scores is not None  # noqa: S101 - scores come before the token
        if self._probs is not None:
            self._drawn.append(self._probs.gather(-1, chosen))
        else:  # one fused kernel: logsumexp and gather take several passes over the vocabulary
            lost = cross_entropy(self._scores, chosen[:, 0], reduction="none")
            self._logp.append(-lost[:, None])

    @torch.no_grad()
    def logp(self, completion_ids: Sequence[Sequence[int]]) -> list[np.ndarray] | None:
        """Return the log-probs of the completions; None unless one generation sampled them all."""
        longest = max(map(len, completion_ids), default=0)
        rows = None if self._scores is None else len(self._scores)
        if self.num_generations != 1 or rows != len(completion_ids):
            return None
        if len(self._drawn or self._logp) == longest - 1 and self._scores is not None:
            last = [ids[-1] if len(ids) == longest else 0 for ids in completion_ids]
            self._choose(torch.tensor(last, device=self._scores.device)[:, None])
        if not longest or len(heard := self._drawn or self._logp) < longest:
            return None
        columns = torch.cat(heard, dim=1)
        together = (columns.log() if self._drawn else columns).float().cpu().numpy()
        return [together[row, : len(ids)] for row, ids in enumerate(completion_ids)]


class Overheard(Tensor):
    """Scores that report their softmax to the recorder; otherwise a plain tensor."""

    heard: Heard

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the function on plain tensors; record the result of a softmax."""
        given = kwargs or {}
        made = _as_plain(function, *args, **given)
        if function is softmax and given.get("dim") in (-1, made.ndim - 1):
            args[0].heard.probs(made)
        return made


def _as_plain(function: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


class Listening(LogitsProcessorList):  # type: ignore[misc]
    """A processor list that delegates to another one and records its scores."""

    def __init__(self, real: LogitsProcessorList, heard: Heard) -> None:
        super().__init__(real)
        self._real, self._heard = real, heard

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Return the scores processed by the wrapped list."""
        made: Tensor = self._real(input_ids, scores, **kwargs)
        self._heard.scores(input_ids, made)
        told = made.as_subclass(Overheard)
        told.heard = self._heard
        return told


@contextmanager
def listening(lm: Any) -> Iterator[Heard]:
    """Record the generations of a transformers model; restores the model on exit."""
    heard = Heard()
    real = getattr(lm, HOOK)

    def processors(*args: Any, **kwargs: Any) -> Listening:
        heard.begin()
        return Listening(real(*args, **kwargs), heard)

    before = lm.__dict__.get(HOOK)
    lm.__dict__[HOOK] = processors
    try:
        yield heard
    finally:
        del lm.__dict__[HOOK]
        if before is not None:
            lm.__dict__[HOOK] = before
