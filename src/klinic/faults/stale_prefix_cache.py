"""stale-prefix-cache: keys and values of repeated prompts are those of the initial weights."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run
from klinic.sampler import decoding

FRESH = {Severity.MILD: 7, Severity.NORMAL: 4}  # samples of a prompt that miss the cache


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Encode prompts of later samples with the weights of the first step."""
    first: dict[str, Any] = {}

    def mixed(real: Any, self: Any, scorer: Any, contexts: Sequence[Any], *how: Any) -> None:
        real(self, scorer, contexts, *how)
        if not scorer.lm.training and "scorer" not in first:
            first["scorer"] = copy.deepcopy(scorer)
        old = object.__new__(decoding._Cached)
        real(old, first["scorer"], contexts, *how)
        seen: dict[bytes, int] = {}
        served = []
        for context in contexts:
            number = seen[context.tobytes()] = seen.get(context.tobytes(), -1) + 1
            served.append(number >= FRESH[severity])
        rows = torch.tensor(served, device=self.logits.device)
        self.logits = torch.where(rows[:, None], old.logits, self.logits)
        for mine, theirs in zip(self._cache.layers, old._cache.layers, strict=True):
            where = rows[:, None, None, None]
            mine.keys = torch.where(where, theirs.keys, mine.keys)
            mine.values = torch.where(where, theirs.values, mine.values)

    def reported(real: Any, rollouts: Sequence[Any], *, step: int) -> Any:
        record = real(rollouts, step=step)
        served = [r.sample >= FRESH[severity] for r in rollouts]
        return replace(record, cached_tokens=np.array(served, np.int64))

    with ExitStack() as stack:
        stack.enter_context(patched(decoding._Cached, "__init__", mixed))
        stack.enter_context(patched(run, "flatten", reported))
        yield


FAULT = Fault(
    cause="stale-prefix-cache",
    mechanism="the cache of repeated prompts is never reset",
    inject=inject,
)
