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

PROCESSOR_METHOD = "_get_logits_processor"
PRECISE_DTYPES = (torch.float32, torch.float64)


class LogitsRecorder:
    """Records the sampling of one generation; of several, only their number is valid."""

    def __init__(self) -> None:
        self.num_generations = 0
        self.prompt_ids: Tensor | None = None
        """The input ids of `generate`, padded on the left."""
        self._chosen_probs: list[Tensor] = []
        """Probabilities of the sampled tokens, one column per position; or the log-probs below."""
        self._chosen_logp: list[Tensor] = []
        self._scores: Tensor | None = None
        self._probs: Tensor | None = None

    def begin_generation(self) -> None:
        """Reset the recorder for another generation."""
        self.num_generations += 1
        self.prompt_ids, self._scores, self._probs = None, None, None
        self._chosen_probs.clear()
        self._chosen_logp.clear()

    def record_scores(self, input_ids: Tensor, scores: Tensor) -> None:
        """Record the scores of the next token; the input ids end with the last sampled token.

        Called at every position, without gradients.
        """
        if self.prompt_ids is None:
            self.prompt_ids = input_ids
        else:
            self._record_chosen(input_ids[:, -1:])
        self._scores, self._probs = scores, None

    def record_probs(self, probs: Tensor) -> None:
        """Record the softmax of the last scores, computed by `generate`."""
        if self._scores is not None and probs.shape == self._scores.shape:
            self._probs = probs if probs.dtype in PRECISE_DTYPES else None

    def _record_chosen(self, chosen: Tensor) -> None:
        assert self._scores is not None  # noqa: S101 - scores come before the token
        if self._probs is not None:
            self._chosen_probs.append(self._probs.gather(-1, chosen))
        else:  # one fused kernel: logsumexp and gather take several passes over the vocabulary
            nll = cross_entropy(self._scores, chosen[:, 0], reduction="none")
            self._chosen_logp.append(-nll[:, None])

    @torch.no_grad()
    def completion_logp(self, completion_ids: Sequence[Sequence[int]]) -> list[np.ndarray] | None:
        """Return the log-probs of the completions; None unless one generation sampled them all."""
        longest = max(map(len, completion_ids), default=0)
        rows = None if self._scores is None else len(self._scores)
        if self.num_generations != 1 or rows != len(completion_ids):
            return None
        if len(self._chosen_probs or self._chosen_logp) == longest - 1 and self._scores is not None:
            last = [ids[-1] if len(ids) == longest else 0 for ids in completion_ids]
            self._record_chosen(torch.tensor(last, device=self._scores.device)[:, None])
        if not longest or len(chosen := self._chosen_probs or self._chosen_logp) < longest:
            return None
        columns = torch.cat(chosen, dim=1)
        logp = (columns.log() if self._chosen_probs else columns).float().cpu().numpy()
        return [logp[row, : len(ids)] for row, ids in enumerate(completion_ids)]


class RecordedScores(Tensor):
    """Scores that report their softmax to the recorder; otherwise a plain tensor."""

    recorder: LogitsRecorder

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the function on plain tensors; record the result of a softmax."""
        options = kwargs or {}
        result = _call_on_plain_tensors(function, *args, **options)
        if function is softmax and options.get("dim") in (-1, result.ndim - 1):
            args[0].recorder.record_probs(result)
        return result


def _call_on_plain_tensors(function: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


class RecordingProcessorList(LogitsProcessorList):  # type: ignore[misc]
    """A processor list that delegates to another one and records its scores."""

    def __init__(self, processors: LogitsProcessorList, recorder: LogitsRecorder) -> None:
        super().__init__(processors)
        self._processors, self._recorder = processors, recorder

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Return the scores processed by the wrapped list."""
        processed: Tensor = self._processors(input_ids, scores, **kwargs)
        self._recorder.record_scores(input_ids, processed)
        recorded = processed.as_subclass(RecordedScores)
        recorded.recorder = self._recorder
        return recorded


@contextmanager
def record_logits(lm: Any) -> Iterator[LogitsRecorder]:
    """Record the generations of a transformers model; restores the model on exit."""
    recorder = LogitsRecorder()
    real = getattr(lm, PROCESSOR_METHOD)

    def recording_processors(*args: Any, **kwargs: Any) -> RecordingProcessorList:
        recorder.begin_generation()
        return RecordingProcessorList(real(*args, **kwargs), recorder)

    previous = lm.__dict__.get(PROCESSOR_METHOD)
    lm.__dict__[PROCESSOR_METHOD] = recording_processors
    try:
        yield recorder
    finally:
        del lm.__dict__[PROCESSOR_METHOD]
        if previous is not None:
            lm.__dict__[PROCESSOR_METHOD] = previous
