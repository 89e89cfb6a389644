"""prompt-mismatch: the sampler prepends a chat role to a plain prompt."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from klinic.faults.base import Fault, Severity, patched
from klinic.sampler.transformers import TransformersSampler

ROLE = "user: "
EVERY = {Severity.MILD: 8, Severity.NORMAL: 1}  # prompts; one in so many is affected


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Prepend a role as a chat template does; the learner scores the original prompt."""

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
    mechanism="the sampler prepends a chat role to the prompt",
    inject=inject,
    visible_at_start=True,
)
