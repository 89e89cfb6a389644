"""Records what transformers' `generate` samples: contexts, tokens, and their log-probs.

TRL takes only token ids from `generate`. A recording LogitsProcessorList captures the processed
scores that each token is sampled from, and reuses the softmax that `generate` computes of them.
The sampled token appears in the input ids of the next call. Only the scores of the last position
are stored. Every model of the process is recorded: a copy of the policy samples as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softmax
from transformers import LogitsProcessorList
from transformers.generation import GenerationMixin

from klinic.evidence.row_join import Emission

SAMPLE_METHOD = "_sample"
PRECISE_DTYPES = (torch.float32, torch.float64)


class LogitsRecorder:
    """Records one call of a model's sampling loop."""

    def __init__(self, model: Any, prompt_ids: Tensor, attention_mask: Tensor | None) -> None:
        self.model = model
        self._prompt_ids = prompt_ids
        """The input ids of `generate`, padded on the left."""
        is_token_mask = attention_mask is not None and attention_mask.shape == prompt_ids.shape
        self._attention_mask = attention_mask if is_token_mask else None
        self._sampled_ids: Tensor | None = None
        self._chosen_probs: list[Tensor] = []
        """Probabilities of the sampled tokens, one column per position; or the log-probs below."""
        self._chosen_logp: list[Tensor] = []
        self._scores: Tensor | None = None
        self._probs: Tensor | None = None

    def record_scores(self, input_ids: Tensor, scores: Tensor) -> None:
        """Record the scores of the next token; the input ids end with the last sampled token.

        Called at every position, without gradients.
        """
        if self._scores is not None:
            self._record_chosen(input_ids[:, -1:])
        self._scores, self._probs = scores, None

    def record_probs(self, probs: Tensor) -> None:
        """Record the softmax of the last scores, computed by `generate`."""
        if self._scores is not None and probs.shape == self._scores.shape:
            self._probs = probs if probs.dtype in PRECISE_DTYPES else None

    @torch.no_grad()
    def record_sequences(self, sequences: Tensor) -> None:
        """Record the prompts and completions that `generate` returns."""
        if self._scores is not None:
            self._record_chosen(sequences[:, -1:])
        self._scores, self._probs = None, None
        self._sampled_ids = sequences[:, self._prompt_ids.shape[1] :]

    def _record_chosen(self, chosen: Tensor) -> None:
        assert self._scores is not None  # noqa: S101 - scores come before the token
        if self._probs is not None:
            self._chosen_probs.append(self._probs.gather(-1, chosen))
        else:  # one fused kernel: logsumexp and gather take several passes over the vocabulary
            nll = cross_entropy(self._scores, chosen[:, 0], reduction="none")
            self._chosen_logp.append(-nll[:, None])

    @torch.no_grad()
    def emissions(self, eos_ids: Sequence[int]) -> list[Emission]:
        """Return the sampled rows, each cut after its first end token."""
        if self._sampled_ids is None:
            return []
        logp = self._sampled_logp()
        ids = self._sampled_ids.cpu().numpy().astype(np.int64)
        emissions = []
        for row, context in enumerate(self._contexts()):
            ends = np.flatnonzero(np.isin(ids[row], eos_ids))
            length = int(ends[0]) + 1 if ends.size else ids.shape[1]
            emission = Emission(
                context=context,
                token_ids=ids[row, :length],
                logp=None if logp is None else logp[row, :length],
                is_ended=bool(ends.size),
            )
            emissions.append(emission)
        return emissions

    def _contexts(self) -> list[np.ndarray | None]:
        prompts = self._prompt_ids.cpu().numpy().astype(np.int64)
        if not prompts.shape[1]:  # the model received embeddings
            return [None] * len(prompts)
        if self._attention_mask is None:
            return list(prompts)
        masks = self._attention_mask.bool().cpu().numpy()
        return [ids[mask] for ids, mask in zip(prompts, masks, strict=True)]

    def _sampled_logp(self) -> np.ndarray | None:
        chosen = self._chosen_probs or self._chosen_logp
        if self._sampled_ids is None or len(chosen) != self._sampled_ids.shape[1]:
            return None
        columns = torch.cat(chosen, dim=1)
        logp: np.ndarray = (columns.log() if self._chosen_probs else columns).float().cpu().numpy()
        return logp


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
def record_generations() -> Iterator[list[LogitsRecorder]]:
    """Record every generation of every transformers model; restores the class on exit."""
    recorders: list[LogitsRecorder] = []
    real = getattr(GenerationMixin, SAMPLE_METHOD)

    def sample_recorded(
        self: Any, input_ids: Tensor, logits_processor: LogitsProcessorList, **kwargs: Any
    ) -> Any:
        recorder = LogitsRecorder(self, input_ids, kwargs.get("attention_mask"))
        processors = RecordingProcessorList(logits_processor, recorder)
        output = real(self, input_ids, logits_processor=processors, **kwargs)
        recorder.record_sequences(output if isinstance(output, Tensor) else output.sequences)
        recorders.append(recorder)
        return output

    setattr(GenerationMixin, SAMPLE_METHOD, sample_recorded)
    try:
        yield recorders
    finally:
        setattr(GenerationMixin, SAMPLE_METHOD, real)
