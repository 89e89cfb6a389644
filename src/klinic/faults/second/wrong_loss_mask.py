"""wrong-loss-mask: the end of the prompt is trained on as if the policy had emitted it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.evidence.record import EmittedBy
from klinic.evidence.rollout import Segment
from klinic.faults.base import Fault, Severity, patched
from klinic.loop import run

EVERY = {Severity.MILD: 16, Severity.NORMAL: 1}  # rows; one in so many is affected
TAIL = {Severity.MILD: 1, Severity.NORMAL: 3}  # tokens of the prompt


@contextmanager
def inject(severity: Severity) -> Iterator[None]:
    """Move the prompt boundary forward, and train on every token after it."""

    def early(rollout: Any) -> Any:
        ids, tail = rollout.prompt.token_ids, TAIL[severity]
        given = Segment(
            token_ids=ids[-tail:],
            emitted_by=EmittedBy.TEMPLATE,
            logp_sampler=None,
            weight_version=rollout.segments[0].weight_version,
        )
        prompt = replace(rollout.prompt, token_ids=ids[:-tail])
        return replace(rollout, prompt=prompt, segments=(given, *rollout.segments))

    def trained(real: Any, rollouts: Any, *, step: int) -> Any:
        cut = [early(r) if i % EVERY[severity] == 0 else r for i, r in enumerate(rollouts)]
        record = real(cut, step=step)
        return replace(record, loss_mask=np.ones_like(record.loss_mask))

    with patched(run, "flatten", trained):
        yield


FAULT = Fault(
    cause="wrong-loss-mask",
    mechanism="the last tokens of the prompt are trained on",
    inject=inject,
    visible_at_start=True,
)
