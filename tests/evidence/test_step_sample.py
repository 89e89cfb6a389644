"""The sample of a step: its first whole groups, and no fact that is a sum over all rows."""

import numpy as np
import pytest

from klinic.evidence.record import StepRecord
from klinic.evidence.step_sample import (
    MIN_GROUPS,
    SAMPLED_TOKENS,
    mark_sample,
    num_sampled_rows,
    sample_record,
)

FACTS = {"loss": 0.5, "loss_denominator": 7.0, "grad_norm": 1.0}


def step_of(lengths, group_size):
    offsets = np.cumsum([0, *lengths])
    return StepRecord(
        step=1,
        group=np.arange(len(lengths)) // group_size,
        row_offsets=offsets,
        token_ids=np.arange(offsets[-1]),
        loss_mask=np.ones(offsets[-1], bool),
        facts=FACTS,
    )


def test_a_small_step_is_its_own_sample():
    record = step_of([10] * 12, 4)
    assert sample_record(record) is record


@pytest.mark.parametrize("length", [100, 1000, 9000])
def test_a_sample_has_whole_groups_of_about_as_many_tokens(length):
    record = step_of([length] * 1600, 8)
    sample = sample_record(record)
    assert sample.num_rows == num_sampled_rows(record) < 1600
    assert sample.num_rows % 8 == 0
    num_groups = sample.num_rows // 8
    assert num_groups == max(MIN_GROUPS, SAMPLED_TOKENS // (8 * length))
    np.testing.assert_array_equal(sample.token_ids, record.token_ids[: sample.num_tokens])
    assert dict(sample.facts) == {"grad_norm": 1.0, "step_rows": 1600, "generation_rows": 1600}
    assert sample_record(sample) is sample  # as it is after it was written and read


def test_rows_that_are_all_are_not_marked():
    record = step_of([5] * 4, 2)
    assert mark_sample(record, 4) is record
