"""What transformers' `generate` drew from: the log-prob of every token as it was sampled.

TRL asks `generate` for token ids alone. The scores that a token is drawn from pass through the list
of logits processors, so a list that listens stands in for it while a batch is generated. The chosen
token is known one call later. Only the last scores are kept, never those of all places.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LogitsProcessorList

HOOK = "_get_logits_processor"


class Heard:
    """What was heard of a generation; of several, only how many there were."""

    def __init__(self) -> None:
        self.num_generations = 0
        self.prompt_ids: Tensor | None = None
        """What `generate` was sent, padded on the left."""
        self._logp: list[Tensor] = []
        self._scores: Tensor | None = None

    def begin(self) -> None:
        """Hear that another generation begins."""
        self.num_generations += 1
        self.prompt_ids, self._scores = None, None
        self._logp.clear()

    @torch.no_grad()
    def scores(self, input_ids: Tensor, scores: Tensor) -> None:
        """Hear the scores that the next token is drawn from; the last token is in the ids."""
        if self.prompt_ids is None:
            self.prompt_ids = input_ids
        else:
            self._choose(input_ids[:, -1])
        self._scores = scores

    def _choose(self, chosen: Tensor) -> None:
        assert self._scores is not None  # noqa: S101 - scores come before the token
        # one kernel for all, where logsumexp and gather make several passes over the vocabulary
        self._logp.append(-cross_entropy(self._scores, chosen, reduction="none"))

    @torch.no_grad()
    def logp(self, completion_ids: Sequence[Sequence[int]]) -> list[np.ndarray] | None:
        """Return the log-probs of the completions; None where they were not drawn in one go."""
        longest = max(map(len, completion_ids), default=0)
        rows = None if self._scores is None else len(self._scores)
        if self.num_generations != 1 or rows != len(completion_ids):
            return None
        if len(self._logp) == longest - 1 and self._scores is not None:
            last = [ids[-1] if len(ids) == longest else 0 for ids in completion_ids]
            self._choose(torch.tensor(last, device=self._scores.device))
        if len(self._logp) < longest:
            return None
        together = torch.stack(self._logp, dim=1).float().cpu().numpy()
        return [together[row, : len(ids)] for row, ids in enumerate(completion_ids)]


class Listening(LogitsProcessorList):  # type: ignore[misc]
    """A list of processors that does what another one does, and tells of it."""

    def __init__(self, real: LogitsProcessorList, heard: Heard) -> None:
        super().__init__(real)
        self._real, self._heard = real, heard

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Return what the other list makes of the scores."""
        made: Tensor = self._real(input_ids, scores, **kwargs)
        self._heard.scores(input_ids, made)
        return made


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
