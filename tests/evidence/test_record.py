"""What a record refuses, and with which words."""

from dataclasses import fields, replace

import numpy as np
import pytest

from evidence.records import full_record
from klinic.errors import EvidenceError
from klinic.evidence.record import ROW_FIELDS, TOKEN_FIELDS, EmittedBy, StepRecord

pytestmark = pytest.mark.usefixtures("unchecked")
RECORD = full_record()
ALONE = {"step", "row_offsets", "prompt_offsets", "prompt_ids", "reward_parts", "facts"}


def test_every_field_is_of_tokens_or_of_rows_or_stands_alone():
    named = [*TOKEN_FIELDS, *ROW_FIELDS, *ALONE]
    assert sorted(named) == sorted(field.name for field in fields(StepRecord))


def test_the_codes_on_disk_never_change():
    assert {e.name: e.value for e in EmittedBy} == {"POLICY": 0, "TOOL": 1, "TEMPLATE": 2}


def test_rows_and_tokens_are_counted():
    assert (RECORD.num_rows, RECORD.num_tokens) == (3, 5)


@pytest.mark.parametrize("name", TOKEN_FIELDS)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_token_array_of_another_length_is_refused(name, change):
    array = np.resize(getattr(RECORD, name), 5 + change)
    with pytest.raises(EvidenceError) as caught:
        replace(RECORD, **{name: array})
    assert str(caught.value) == (
        f"step 1: `{name}` has {5 + change} tokens, but `row_offsets` ends at 5. "
        "Record every token array over the same rows, concatenated."
    )


@pytest.mark.parametrize("name", ROW_FIELDS)
def test_a_row_array_of_another_length_is_refused(name):
    with pytest.raises(EvidenceError, match=f"step 1: `{name}` has 2 entries, .* describes 3 rows"):
        replace(RECORD, **{name: getattr(RECORD, name)[:2]})


def test_a_reward_part_of_another_length_is_refused():
    with pytest.raises(EvidenceError, match="`reward/style` has 4 entries"):
        replace(RECORD, reward_parts={"style": np.zeros(4)})


@pytest.mark.parametrize("offsets", [[1, 2, 3, 5], [0, 3, 2, 5], [[0, 5]], []])
@pytest.mark.parametrize("name", ["row_offsets", "prompt_offsets"])
def test_offsets_start_at_0_and_never_fall(name, offsets):
    with pytest.raises(EvidenceError, match=f"`{name}` must start at 0 and never decrease"):
        replace(RECORD, **{name: np.array(offsets, np.int64)})


def test_a_mask_of_numbers_is_refused_because_it_would_pick_tokens_by_place():
    with pytest.raises(EvidenceError, match="`loss_mask` is int64"):
        replace(RECORD, loss_mask=RECORD.loss_mask.astype(np.int64))


@pytest.mark.parametrize("name", ["prompt_offsets", "prompt_ids"])
def test_prompts_without_offsets_or_the_reverse_are_refused(name):
    with pytest.raises(EvidenceError, match="Record both or neither"):
        replace(RECORD, **{name: None})


def test_prompts_lie_over_the_same_rows():
    with pytest.raises(EvidenceError, match="`prompt_ids` has 5 tokens"):
        replace(RECORD, prompt_ids=RECORD.prompt_ids[:5])
    with pytest.raises(EvidenceError, match="`prompt_offsets` has 2 entries"):
        replace(RECORD, prompt_offsets=np.array([0, 1, 6]))


def test_a_fact_that_json_cannot_hold_is_refused():
    with pytest.raises(EvidenceError, match="the fact `grad` is a ndarray"):
        replace(RECORD, facts={"grad": np.zeros(2)})


def test_a_negative_step_is_refused():
    with pytest.raises(EvidenceError, match="step -1"):
        replace(RECORD, step=-1)
