"""hidden-sampling-transform: top-p that the recipe does not declare.

Second mechanism: a repetition penalty from the model's generation config.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.faults.sampler_patches import replace_attribute, while_sampling
from klinic.sampler import decoding
from klinic.sampler.decoding import _DecodingBatch

TOP_P = {Severity.MILD: 0.95, Severity.NORMAL: 0.8}


@contextmanager
def apply_hidden_top_p(severity: Severity) -> Iterator[None]:
    """Sample from the top-p subset, and report log-probs renormalised within it."""

    def draw_top_p(real: Any, logits: Any, uniform: Any, params: Any) -> Any:
        if params.temperature:  # 0 in evaluations
            params = replace(params, top_p=TOP_P[severity])
        return real(logits, uniform, params)

    with patch_attribute(decoding, "sample_tokens", draw_top_p):
        yield


FAULT = Fault(
    cause="hidden-sampling-transform",
    mechanism="top-p that the recipe does not declare",
    inject=apply_hidden_top_p,
    visible_at_start=True,
)


PENALTY = {Severity.MILD: 1.03, Severity.NORMAL: 1.3}


@contextmanager
def apply_repetition_penalty(severity: Severity) -> Iterator[None]:
    """Lower the probability of tokens that occur in prompt or completion."""

    class PenalisedBatch(_DecodingBatch):
        """A decoding batch that tracks the tokens of each row."""

        def __init__(self, scorer: Any, contexts: Sequence[np.ndarray], *rest: Any) -> None:
            self._seen_tokens: torch.Tensor | None = None
            super().__init__(scorer, contexts, *rest)
            self._seen_tokens = torch.zeros_like(self.logits, dtype=torch.bool)
            for row, context in enumerate(contexts):
                self._seen_tokens[row, torch.from_numpy(context)] = True
            self._apply_penalty()

        def select_rows(self, rows: Sequence[int]) -> None:
            super().select_rows(rows)
            self._seen_tokens = None if self._seen_tokens is None else self._seen_tokens[list(rows)]

        def append_tokens(self, token_ids: torch.Tensor) -> None:
            assert self._seen_tokens is not None  # noqa: S101 - set in __init__
            self._seen_tokens.scatter_(1, token_ids[:, None], True)
            super().append_tokens(token_ids)
            self._apply_penalty()

        def _apply_penalty(self) -> None:
            factor = torch.where(self.logits > 0, 1 / PENALTY[severity], PENALTY[severity])
            assert self._seen_tokens is not None  # noqa: S101
            self.logits = torch.where(self._seen_tokens, factor * self.logits, self.logits)

    def use_penalised_batch(_scorer: Any, _streams: Any) -> AbstractContextManager[None]:
        return replace_attribute(decoding, "_DecodingBatch", PenalisedBatch)

    with while_sampling(use_penalised_batch):
        yield


SECOND_FAULT = Fault(
    cause="hidden-sampling-transform",
    mechanism="a repetition penalty that the recipe does not declare",
    inject=apply_repetition_penalty,
    visible_at_start=True,
)
