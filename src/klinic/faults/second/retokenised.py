"""retokenised: completions pass through text and a tokenizer that folds similar characters."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run
from klinic.model.tiny import tiny_tokenizer

FOLDED = {"0": "o", "2": "z", "5": "s", "8": "b"}
EVERY = {Severity.MILD: 16, Severity.NORMAL: 1}  # rows; one in so many is re-encoded


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Decode, normalise and re-encode the sampled ids, and train on the result."""
    tokenizer = tiny_tokenizer()
    fold = str.maketrans(FOLDED)

    def again(segment: Any) -> Any:
        text = tokenizer.decode(segment.token_ids.tolist()).translate(fold)
        return replace(segment, token_ids=np.array(tokenizer.encode(text), np.int64))

    def through_text(real: Any, rollouts: Any, *, step: int) -> Any:
        encoded = list(rollouts)
        for row in range(0, len(encoded), EVERY[severity]):
            segments = tuple(map(again, encoded[row].segments))
            encoded[row] = replace(encoded[row], segments=segments)
        return real(encoded, step=step)

    with patched(run, "flatten", through_text):
        yield


FAULT = Fault(
    cause="retokenised",
    mechanism="decoded and encoded by a tokenizer that folds look-alike characters",
    inject=inject,
    visible_at_start=True,
)
