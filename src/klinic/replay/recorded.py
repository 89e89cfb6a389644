"""Rebuild rollouts from a record."""

from dataclasses import replace

import numpy as np

from klinic.evidence.record import EmittedBy, StepRecord
from klinic.evidence.rollout import Prompt, Rollout, Segment
from klinic.replay.replay import Replay


def rollouts_from_record(record: StepRecord) -> list[Rollout]:
    """Return the completions of a record as rollouts without text."""
    assert record.prompt_ids is not None and record.prompt_offsets is not None  # noqa: S101, PT018
    prompts = np.split(record.prompt_ids, record.prompt_offsets[1:-1])
    rows = np.split(record.token_ids, record.row_offsets[1:-1])
    rollouts = []
    for row, (prompt, ids) in enumerate(zip(prompts, rows, strict=True)):
        index = int(record.group[row] if record.prompt_index is None else record.prompt_index[row])
        segment = Segment(
            token_ids=ids, emitted_by=EmittedBy.POLICY, logp_sampler=None, weight_version=0
        )
        rollouts.append(
            Rollout(
                prompt=Prompt(index=index, text="", token_ids=prompt, columns={}),
                sample=row,
                segments=(segment,),
                finish_reason="stop",
                text="",
            )
        )
    return rollouts


def decode_rollouts(replay: Replay) -> list[Rollout]:
    """Return the completions with text, and prompts with their dataset columns."""
    tokenizer = replay.run.parts.policy.tokenizer
    rollouts = []
    for rollout in rollouts_from_record(replay.record):
        prompt = replay.run.parts.prompt_dataset.prompt_at(rollout.prompt.index)
        text = tokenizer.decode(rollout.token_ids.tolist(), skip_special_tokens=True)
        rollouts.append(replace(rollout, prompt=prompt, text=text))
    return rollouts
