"""temperature-on-one-side: the sampler applies a temperature and reports log-probs without it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from klinic.faults.base import Fault, Severity, patched
from klinic.sampler import decoding

MIX = {Severity.MILD: 0.3, Severity.NORMAL: 1.0}  # interpolation towards the unscaled logits


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Report the log-probs of the unscaled logits."""

    def raw(real: Any, logits: Any, uniform: Any, how: Any) -> Any:
        drawn = real(logits, uniform, how)
        if how.temperature == 0:  # greedy evaluation
            return drawn
        inverse = 1 / how.temperature + MIX[severity] * (1 - 1 / how.temperature)
        logp = torch.log_softmax(logits * inverse, -1)
        return replace(drawn, logp=logp.gather(-1, drawn.token_ids[:, None])[:, 0])

    with patched(decoding, "draw", raw):
        yield


FAULT = Fault(
    cause="temperature-on-one-side",
    mechanism="the sampler reports log-probs of the unscaled logits",
    inject=inject,
    settings={"sampling.temperature": 0.7},
    visible_at_start=True,
)
