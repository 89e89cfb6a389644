"""hidden-sampling-transform: a repetition penalty from the model's generation config."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from klinic.faults.base import Fault, Severity
from klinic.faults.second.sampling import replaced, while_sampling
from klinic.sampler import decoding
from klinic.sampler.decoding import _Cached

PENALTY = {Severity.MILD: 1.03, Severity.NORMAL: 1.3}


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Lower the probability of tokens that occur in prompt or completion."""

    class Penalised(_Cached):
        """A decoding batch that tracks the tokens of each row."""

        def __init__(self, scorer: Any, contexts: Sequence[np.ndarray], *rest: Any) -> None:
            self._seen: torch.Tensor | None = None
            super().__init__(scorer, contexts, *rest)
            self._seen = torch.zeros_like(self.logits, dtype=torch.bool)
            for row, context in enumerate(contexts):
                self._seen[row, torch.from_numpy(context)] = True
            self._punish()

        def keep(self, rows: Sequence[int]) -> None:
            super().keep(rows)
            self._seen = None if self._seen is None else self._seen[list(rows)]

        def grow(self, token_ids: torch.Tensor) -> None:
            assert self._seen is not None  # noqa: S101 - set in __init__
            self._seen.scatter_(1, token_ids[:, None], True)
            super().grow(token_ids)
            self._punish()

        def _punish(self) -> None:
            by = torch.where(self.logits > 0, 1 / PENALTY[severity], PENALTY[severity])
            assert self._seen is not None  # noqa: S101
            self.logits = torch.where(self._seen, by * self.logits, self.logits)

    def with_penalty(_scorer: Any, _streams: Any) -> AbstractContextManager[None]:
        return replaced(decoding, "_Cached", Penalised)

    with while_sampling(with_penalty):
        yield


FAULT = Fault(
    cause="hidden-sampling-transform",
    mechanism="a repetition penalty that the recipe does not declare",
    inject=inject,
    visible_at_start=True,
)
