"""Tables that somebody else wrote: what is forgiven, and what is refused by name."""

import numpy as np
import pyarrow as pa
import pytest

from evidence.records import assert_same, full_record
from klinic.errors import EvidenceError
from klinic.evidence.columns import from_table, to_table
from klinic.evidence.record import ROW_FIELDS, TOKEN_FIELDS, select_rows

SMALLEST = {"token_ids": [[5, 6], [7]], "loss_mask": [[True, False], [True]], "group": [0, 0]}


def read(columns, **types):
    arrays = {name: pa.array(values, types.get(name)) for name, values in columns.items()}
    return from_table(pa.table(arrays), step=1, facts={}, source="here")


def refusal(**changes):
    with pytest.raises(EvidenceError) as caught:
        read({k: v for k, v in (SMALLEST | changes).items() if v is not ...})
    return str(caught.value)


def test_the_smallest_legal_table_has_three_columns():
    record = read(SMALLEST)
    assert record.row_offsets.tolist() == [0, 2, 3]
    assert record.token_ids.tolist() == [5, 6, 7]
    assert record.loss_mask.tolist() == [True, False, True]
    empty = {*TOKEN_FIELDS, *ROW_FIELDS} - set(SMALLEST)
    assert all(getattr(record, name) is None for name in empty)
    assert (record.prompt_ids, record.reward_parts, record.facts) == (None, {}, {})


def test_each_column_may_be_missing_and_leaves_the_others_alone():
    whole = to_table(full_record())
    for name in set(whole.column_names) - {"token_ids", "group", "loss_mask", "prompt_ids"}:
        found = from_table(whole.drop_columns([name]), step=1, facts={}, source="here")
        if name.startswith("reward/"):
            assert name.removeprefix("reward/") not in found.reward_parts
        else:
            assert getattr(found, name) is None
        np.testing.assert_array_equal(found.token_ids, full_record().token_ids)


def test_a_mask_is_derived_from_who_emitted_and_the_record_says_so():
    record = read({"token_ids": [[5, 6, 7]], "group": [0], "emitted_by": [[0, 1, 2]]})
    assert record.loss_mask.tolist() == [True, False, False]
    assert record.facts == {"loss_mask_from": "emitted_by"}


def test_a_recorded_mask_is_not_said_to_be_derived():
    record = read(SMALLEST | {"emitted_by": [[0, 1], [1]]})
    assert record.loss_mask.tolist() == [True, False, True]
    assert record.facts == {}


def test_what_nobody_knows_is_ignored_and_what_is_only_none_was_not_recorded():
    record = read(
        SMALLEST | {"colour": ["red", "blue"], "logp": [None, None], "reward": [None] * 2}
    )
    assert (record.logp, record.reward) == (None, None)


def test_numbers_of_a_near_kind_are_understood():
    lists = {"loss_mask": [[1, 0], [1]], "logp": [[-1, None], [-3]]}
    rows = {"reward": [1, None], "reward/a": [0, 2], "finish_reason": ["stop", None]}
    record = read(SMALLEST | lists | rows, token_ids=pa.list_(pa.uint16()), group=pa.int32())
    assert record.token_ids.dtype == record.group.dtype == np.int64
    assert record.loss_mask.tolist() == [True, False, True]
    np.testing.assert_array_equal(record.logp, [-1.0, np.nan, -3.0])
    np.testing.assert_array_equal(record.reward, [1.0, np.nan])
    assert record.reward_parts["a"].tolist() == [0.0, 2.0]
    assert record.finish_reason.tolist() == ["stop", ""]


def test_rows_of_one_fixed_length_are_lists_too():
    columns = SMALLEST | {"token_ids": [[5, 6], [7, 8]], "loss_mask": [[True, True], [True, True]]}
    record = read(columns, token_ids=pa.list_(pa.int64(), 2))
    assert record.token_ids.tolist() == [5, 6, 7, 8]


def test_many_chunks_are_one_table():
    table = to_table(full_record())
    chunks = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    found = from_table(chunks, step=1, facts=full_record().facts, source="here")
    assert_same(found, full_record())


@pytest.mark.parametrize("name", ["token_ids", "group"])
def test_without_tokens_or_groups_there_is_nothing_to_check(name):
    assert f"here: has no column `{name}`" in refusal(**{name: ...})


def test_without_mask_and_emitter_there_is_nothing_to_train_on():
    assert "neither `loss_mask` nor `emitted_by`" in refusal(loss_mask=...)


def test_a_list_of_another_length_is_named_by_its_row():
    message = refusal(logp=[[-1.0, -1.0], [-1.0, -2.0]])
    assert message.startswith("here: column `logp` has 2 entries in row 1, but `token_ids` has 1.")


@pytest.mark.parametrize(
    ("column", "values", "found"),
    [
        ("logp", [-1.0, -2.0], "holds double, not lists"),
        ("logp", [[-1.0, -1.0], None], "has no list in row 1"),
        ("rank", [[1, None], [2]], "has 1 nulls"),
        ("prompt_ids_match", [True, None], "has 1 nulls"),
        ("emitted_by", [["policy", "tool"], ["policy"]], "cannot be read"),
        ("emitted_by", [[0, 300], [0]], "cannot be read"),
        ("reward", [[1.0], [2.0]], "cannot be read"),
        ("sample", [0.5, 1.0], "cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_refused(column, values, found):
    message = refusal(**{column: values})
    assert message.startswith(f"here: column `{column}` {found}")
    assert message.endswith("or leave the column out.")


def test_a_column_that_is_there_twice_is_refused():
    table = pa.table({name: pa.array(v) for name, v in SMALLEST.items()})
    twice = table.append_column("group", pa.array([1, 1]))
    with pytest.raises(EvidenceError, match=r"column `group` occurs twice\. Write it once\.$"):
        from_table(twice, step=1, facts={}, source="here")


def test_rows_of_several_parts_are_read_in_the_order_of_the_step():
    whole = full_record()
    orders = np.random.default_rng(5).permutation(whole.num_rows)
    parts = [orders[: whole.num_rows // 2], orders[whole.num_rows // 2 :]]
    tables = [to_table(select_rows(whole, rows.tolist()), rows) for rows in parts]
    found = from_table(pa.concat_tables(tables), step=whole.step, facts=whole.facts, source="here")
    assert_same(found, whole)


@pytest.mark.parametrize("rows", [[0, 0], [1, 2], [-1, 0]])
def test_rows_without_an_order_are_refused(rows):
    message = refusal(step_row=rows)
    assert message.startswith("here: column `step_row` must number the rows of the step from 0")
