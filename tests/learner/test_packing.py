"""Micro-batches hold rows of similar length, in no more room than was given."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from klinic.evidence.rollout import EmittedBy, Prompt, Rollout, Segment, flatten_rollouts
from klinic.learner.packing import gather_tokens, make_micro_batches

CPU = torch.device("cpu")


def step_of(lengths):
    prompt = Prompt(index=0, text="p", token_ids=np.array([3, 4]), columns={})
    segments = [
        Segment(
            token_ids=np.full(length, 5),
            emitted_by=EmittedBy.POLICY,
            logp_sampler=np.zeros(length, dtype=np.float32),
            weight_version=0,
        )
        for length in lengths
    ]
    rollouts = [
        Rollout(prompt=prompt, sample=i, segments=(segment,), text="", finish_reason="stop")
        for i, segment in enumerate(segments)
    ]
    return flatten_rollouts(rollouts, step=1)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    size=st.integers(1, 9),
    packed=st.booleans(),
)
def test_every_row_once_and_never_more_room_than_given(lengths, size, packed):
    record = step_of(lengths)
    batches = make_micro_batches(record, size=size, pad_id=0, device=CPU, packed=packed)
    assert sorted(np.concatenate([b.rows for b in batches]).tolist()) == list(range(len(lengths)))
    room = size * (2 + max(lengths))
    assert all(b.layout.input_ids.numel() <= room for b in batches)
    values = torch.arange(record.num_tokens, dtype=torch.float64)
    assert torch.equal(
        gather_tokens([values[b.tokens] for b in batches], batches, len(values)), values
    )


def test_rows_of_one_batch_stay_in_the_order_of_the_step():
    (batch,) = make_micro_batches(step_of([3, 1, 2]), size=3, pad_id=0, device=CPU)
    assert batch.rows.tolist() == [0, 1, 2]


def test_packed_rows_have_no_padding_and_positions_of_their_own():
    (batch,) = make_micro_batches(step_of([3, 1, 2]), size=3, pad_id=0, device=CPU, packed=True)
    layout = batch.layout
    assert layout.input_ids.tolist() == [[3, 4, 5, 5, 5, 3, 4, 5, 3, 4, 5, 5]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]]
    assert layout.predict_at.tolist() == [1, 2, 3, 6, 9, 10]
    assert torch.equal(layout.input_ids[0, layout.predict_at + 1], layout.target_ids)


def test_little_is_padding_where_neighbours_would_be_mostly_padding():
    stream = np.random.default_rng(0)
    lengths = np.clip(stream.lognormal(4.0, 1.0, 64), 4, 512).astype(int)
    record = step_of(lengths.tolist())
    batches = make_micro_batches(record, size=8, pad_id=0, device=CPU)
    useful = int((lengths + 2).sum())
    assert useful / sum(b.layout.input_ids.numel() for b in batches) > 0.85
    neighbours = sum(8 * (2 + lengths[i : i + 8].max()) for i in range(0, 64, 8))
    assert useful / neighbours == pytest.approx(0.4, abs=0.1)
