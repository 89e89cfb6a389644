"""What transformers' `generate` drew from: the log-prob of every token as it was sampled.

TRL asks `generate` for token ids alone. The scores that a token is drawn from pass through the list
of logits processors, so a list that listens stands in for it while a batch is generated. What
`generate` makes of the scores is heard too: its softmax has been paid for, and a log-prob is the
logarithm of one of its numbers. The chosen token is known one call later. Only the last scores are
kept, never those of all places.
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
    """What was heard of a generation; of several, only how many there were."""

    def __init__(self) -> None:
        self.num_generations = 0
        self.prompt_ids: Tensor | None = None
        """What `generate` was sent, padded on the left."""
        self._drawn: list[Tensor] = []
        """Probabilities of the chosen tokens, a column a place, or else their log-probs below."""
        self._logp: list[Tensor] = []
        self._scores: Tensor | None = None
        self._probs: Tensor | None = None

    def begin(self) -> None:
        """Hear that another generation begins."""
        self.num_generations += 1
        self.prompt_ids, self._scores, self._probs = None, None, None
        self._drawn.clear()
        self._logp.clear()

    def scores(self, input_ids: Tensor, scores: Tensor) -> None:
        """Hear the scores that the next token is drawn from; the last token is in the ids.

        It is called at every token, without gradients as all that `generate` does.
        """
        if self.prompt_ids is None:
            self.prompt_ids = input_ids
        else:
            self._choose(input_ids[:, -1:])
        self._scores, self._probs = scores, None

    def probs(self, probs: Tensor) -> None:
        """Hear what `generate` made of the scores, to draw from it."""
        if self._scores is not None and probs.shape == self._scores.shape:
            self._probs = probs if probs.dtype in PRECISE else None

    def _choose(self, chosen: Tensor) -> None:
        assert self._scores is not None  # noqa: S101 - scores come before the token
        if self._probs is not None:
            self._drawn.append(self._probs.gather(-1, chosen))
        else:  # one kernel for all: logsumexp and gather make several passes over the vocabulary
            lost = cross_entropy(self._scores, chosen[:, 0], reduction="none")
            self._logp.append(-lost[:, None])

    @torch.no_grad()
    def logp(self, completion_ids: Sequence[Sequence[int]]) -> list[np.ndarray] | None:
        """Return the log-probs of the completions; None where they were not drawn in one go."""
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
    """Scores that tell of their softmax, and are a plain tensor to everything else."""

    heard: Heard

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do as a plain tensor does."""
        given = kwargs or {}
        made = _as_plain(function, *args, **given)
        if function is softmax and given.get("dim") in (-1, made.ndim - 1):
            args[0].heard.probs(made)
        return made


def _as_plain(function: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


class Listening(LogitsProcessorList):  # type: ignore[misc]
    """A list of processors that does what another one does, and tells of it."""

    def __init__(self, real: LogitsProcessorList, heard: Heard) -> None:
        super().__init__(real)
        self._real, self._heard = real, heard

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Return what the other list makes of the scores."""
        made: Tensor = self._real(input_ids, scores, **kwargs)
        self._heard.scores(input_ids, made)
        told = made.as_subclass(Overheard)
        told.heard = self._heard
        return told


@contextmanager
def listening(lm: Any) -> Iterator[Heard]:
    """Hear what a transformers model draws from; it is as it was afterwards."""
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
