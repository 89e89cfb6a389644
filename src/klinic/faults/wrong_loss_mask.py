"""wrong-loss-mask: some of the policy's tokens are never trained on.

Second mechanism: the end of the prompt is trained on as if the policy had emitted it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from klinic.evidence.record import EmittedBy
from klinic.evidence.rollout import Segment
from klinic.faults.base import Fault, Severity, patch_attribute
from klinic.training import run

MASKED_TOKEN_EVERY = {Severity.MILD: 20, Severity.NORMAL: 3}  # tokens; one in so many is masked


@contextmanager
def mask_policy_tokens(severity: Severity) -> Iterator[None]:
    """Mask some of the policy's tokens."""

    def flatten_with_holes(real: Any, rollouts: Any, *, step: int) -> Any:
        record = real(rollouts, step=step)
        mask = np.array(record.loss_mask)
        mask[:: MASKED_TOKEN_EVERY[severity]] = False
        return replace(record, loss_mask=mask)

    with patch_attribute(run, "flatten_rollouts", flatten_with_holes):
        yield


FAULT = Fault(
    cause="wrong-loss-mask",
    mechanism="every third token is masked",
    inject=mask_policy_tokens,
    visible_at_start=True,
)


MOVED_BOUNDARY_EVERY = {Severity.MILD: 16, Severity.NORMAL: 1}  # rows; one in so many is affected
NUM_PROMPT_TOKENS = {Severity.MILD: 1, Severity.NORMAL: 3}  # tokens of the prompt


@contextmanager
def train_on_prompt_end(severity: Severity) -> Iterator[None]:
    """Move the prompt boundary forward, and train on every token after it."""

    def move_boundary(rollout: Any) -> Any:
        ids, tail = rollout.prompt.token_ids, NUM_PROMPT_TOKENS[severity]
        prompt_end = Segment(
            token_ids=ids[-tail:],
            emitted_by=EmittedBy.TEMPLATE,
            logp_sampler=None,
            weight_version=rollout.segments[0].weight_version,
        )
        prompt = replace(rollout.prompt, token_ids=ids[:-tail])
        return replace(rollout, prompt=prompt, segments=(prompt_end, *rollout.segments))

    def flatten_with_prompt(real: Any, rollouts: Any, *, step: int) -> Any:
        cut = [
            move_boundary(r) if i % MOVED_BOUNDARY_EVERY[severity] == 0 else r
            for i, r in enumerate(rollouts)
        ]
        record = real(cut, step=step)
        return replace(record, loss_mask=np.ones_like(record.loss_mask))

    with patch_attribute(run, "flatten_rollouts", flatten_with_prompt):
        yield


SECOND_FAULT = Fault(
    cause="wrong-loss-mask",
    mechanism="the last tokens of the prompt are trained on",
    inject=train_on_prompt_end,
    visible_at_start=True,
)
