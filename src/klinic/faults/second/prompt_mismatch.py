"""prompt-mismatch: the sampler puts a chat's role in front of a plain prompt."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.sampler.transformers import TransformersSampler

ROLE = "user: "
EVERY = {Severity.MILD: 8, Severity.NORMAL: 1}  # prompts; one of so many


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Begin prompts as a chat template would; the learner scores them as they were given."""

    def begun(real: Any, sampler: Any, rollout: Any, step: int) -> Any:
        stream = real(sampler, rollout, step)
        evaluation = sampler._how.temperature == 0
        if not evaluation and rollout.prompt.index % EVERY[severity] == 0:
            role = np.array(sampler._policy.tokenizer.encode(ROLE), np.int64)
            stream.context = np.concatenate([role, stream.context])
        return stream

    with patched(TransformersSampler, "_stream", begun):
        yield


FAULT = Fault(
    cause="prompt-mismatch",
    mechanism="the sampler puts a chat's role in front of the prompt",
    inject=inject,
    visible_at_start=True,
)
