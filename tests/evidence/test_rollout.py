"""Rollouts become flat records."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from klinic.errors import EvidenceError
from klinic.evidence.record import EmittedBy
from klinic.evidence.rollout import Prompt, Rollout, Segment, flatten_rollouts


def segment(ids, by=EmittedBy.POLICY, logp=None, version=0):
    logp = None if logp is None else np.array(logp, np.float32)
    return Segment(
        token_ids=np.array(ids, np.int64), emitted_by=by, logp_sampler=logp, weight_version=version
    )


def rollout(segments, index=0, sample=0, prompt_ids=(1, 2), finish="stop"):
    prompt = Prompt(index=index, text="?", token_ids=np.array(prompt_ids, np.int64), columns={})
    return Rollout(
        prompt=prompt, sample=sample, segments=tuple(segments), finish_reason=finish, text="!"
    )


AGENT = rollout(
    [
        segment([5, 6], logp=[-0.5, -0.25], version=3),
        segment([7, 8, 9], EmittedBy.TOOL, version=3),
        segment([4], EmittedBy.TEMPLATE, version=4),
        segment([10], logp=[-2.0], version=4),
    ],
    index=70,
)


def test_tokens_lie_end_to_end_with_who_emitted_them():
    record = flatten_rollouts([rollout([segment([3])], index=9, finish="length"), AGENT], step=5)
    assert record.step == 5
    assert record.row_offsets.tolist() == [0, 1, 8]
    assert record.token_ids.tolist() == [3, 5, 6, 7, 8, 9, 4, 10]
    assert record.emitted_by.tolist() == [0, 0, 0, 1, 1, 1, 2, 0]
    assert record.emitted_by.dtype == np.int8
    assert record.loss_mask.tolist() == [True, True, True, False, False, False, False, True]
    assert record.weight_version.tolist() == [0, 3, 3, 3, 3, 3, 4, 4]
    assert record.finish_reason.tolist() == ["length", "stop"]
    assert record.prompt_ids.tolist() == [1, 2, 1, 2]
    assert record.prompt_offsets.tolist() == [0, 2, 4]


def test_what_the_sampler_did_not_report_is_nan_and_the_rest_is_kept_as_given():
    record = flatten_rollouts([AGENT], step=1)
    assert record.logp_sampler.dtype == np.float32
    expected = [-0.5, -0.25, np.nan, np.nan, np.nan, np.nan, -2.0]
    np.testing.assert_array_equal(record.logp_sampler, np.array(expected, np.float32))


def test_a_sampler_that_reports_nothing_leaves_no_field():
    assert flatten_rollouts([rollout([segment([3, 4])])], step=1).logp_sampler is None


@given(st.lists(st.integers(0, 3), max_size=8))
def test_groups_are_numbered_by_first_appearance(indices):
    record = flatten_rollouts([rollout([segment([1])], index=i) for i in indices], step=1)
    order = list(dict.fromkeys(indices))
    assert record.group.tolist() == [order.index(i) for i in indices]
    assert record.prompt_index.tolist() == indices


def test_samples_keep_their_number():
    record = flatten_rollouts([rollout([segment([1])], sample=s) for s in (2, 0)], step=1)
    assert record.sample.tolist() == [2, 0]


def test_nothing_at_all_is_a_record_without_rows():
    record = flatten_rollouts([], step=1)
    assert (record.num_rows, record.num_tokens) == (0, 0)


def test_a_completion_without_tokens_is_a_row_without_tokens():
    assert flatten_rollouts([rollout([]), AGENT], step=1).row_offsets.tolist() == [0, 0, 7]


def test_a_rollout_knows_its_tokens():
    assert AGENT.token_ids.tolist() == [5, 6, 7, 8, 9, 4, 10]
    assert AGENT.num_policy_tokens == 3
    assert rollout([]).token_ids.dtype == np.int64


def test_a_shifted_logp_is_refused(unchecked):
    with pytest.raises(EvidenceError, match="has 2 tokens, but `logp_sampler` has 3"):
        segment([1, 2], logp=[-1.0, -1.0, -1.0])


def test_a_tool_has_no_logp():
    with pytest.raises(EvidenceError, match="a tool segment has `logp_sampler`"):
        segment([1], EmittedBy.TOOL, logp=[-1.0])
