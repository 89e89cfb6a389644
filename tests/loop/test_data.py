"""Rows are read, checked one by one, and dealt out as a function of the step."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from klinic.errors import ConfigError, DataError
from klinic.loop.data import Prompts, checked, read_rows

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]


def prompts(per_step=3, seed=0, rows=ROWS):
    return Prompts(rows, encode=lambda text: [ord(c) for c in text], per_step=per_step, seed=seed)


def written(tmp_path, suffix, data):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(data)
    return str(path)


def test_every_format_gives_the_same_rows(tmp_path):
    jsonl = "\n".join(json.dumps(row) for row in ROWS).encode()
    csv = "prompt,answer\n" + "".join(f"{r['prompt']},{r['answer']}\n" for r in ROWS)
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    for path in (
        written(tmp_path, ".jsonl", jsonl + b"\n\n"),
        written(tmp_path, ".json", json.dumps(ROWS).encode()),
        written(tmp_path, ".csv", csv.encode()),
        str(tmp_path / "rows.parquet"),
    ):
        assert [dict(row) for row in read_rows(path, split="train")] == ROWS


def test_an_epoch_holds_every_row_at_most_once_and_epochs_differ():
    one = prompts()
    first = [p.index for step in (1, 2, 3) for p in one.at(step)]
    second = [p.index for step in (4, 5, 6) for p in one.at(step)]
    assert len(set(first)) == len(set(second)) == 9
    assert first != second
    assert [p.index for p in prompts().at(2)] == first[3:6]
    assert [p.index for p in prompts(seed=1).at(1)] != first[:3]


def test_a_prompt_carries_ids_and_the_other_columns():
    prompt = prompts().prompt(4)
    assert (prompt.index, prompt.text, dict(prompt.columns)) == (4, "4+1=", {"answer": "5"})
    assert np.array_equal(prompt.token_ids, [ord(c) for c in "4+1="])


def test_more_prompts_than_rows_are_refused():
    with pytest.raises(ConfigError, match="a prompt would be in a step twice"):
        prompts(per_step=11)


def test_the_digest_is_that_of_the_rows():
    assert prompts().digest() == prompts(per_step=2, seed=5).digest()
    assert prompts().digest() != prompts(rows=ROWS[:9]).digest()


@pytest.mark.parametrize(
    ("suffix", "data", "says"),
    [
        (".jsonl", b'{"promt": "a"}', "row 1 has no `prompt`.*Rename 'promt' to it"),
        (".jsonl", b'{"prompt": "a"}\n{"prompt": 5}', "row 2: `prompt` is 5"),
        (".jsonl", b'{"prompt": ""}', "at least one character"),
        (".jsonl", b'{"prompt": [{"role": "user"}]}', "apply the model's chat template"),
        (".jsonl", b'{"prompt": "a"', "line 1 is not JSON"),
        (".jsonl", b"[1]", "is \\[1\\], not a mapping"),
        (".jsonl", b'{"prompt": "\\ud800"}', "not valid Unicode"),
        (".jsonl", b"\xff\xfe", "is not UTF-8"),
        (".jsonl", b"", "has no rows"),
        (".jsonl", b"[" * 100_000, "is not JSON"),
        (".json", b'{"prompt": "a"}', "not a list of rows"),
        (".csv", b'prompt\n"a', "is not a CSV file"),
        (".csv", b"question\nx\n", "has no `prompt` \\(it has 'question'\\)"),
        (".parquet", b"PAR1 no", "not a readable Parquet"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, suffix, data, says):
    with pytest.raises(DataError, match=says):
        read_rows(written(tmp_path, suffix, data), split="train")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_rows(str(tmp_path / "none.jsonl"), split="train")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300)
@given(JSON | st.dictionaries(st.sampled_from(["prompt", "promt", "x"]), JSON))
def test_any_row_is_used_or_refused_with_a_reason(row):
    good = isinstance(row, dict) and isinstance(row.get("prompt"), str) and row["prompt"] != ""
    refusal = refusal_of(lambda: checked([(1, row)], "rows.jsonl"))
    if refusal is None:
        assert good
    else:
        assert "row 1" in refusal
        assert not good or "Unicode" in refusal


@settings(max_examples=200)
@given(st.binary(max_size=60), st.sampled_from([".jsonl", ".json", ".csv", ".parquet"]))
def test_any_bytes_are_used_or_refused_with_a_reason(tmp_path_factory, data, suffix):
    path = written(tmp_path_factory.getbasetemp(), suffix, data)
    refusal = refusal_of(lambda: read_rows(path, split="train"))
    assert refusal is None or path in refusal


def refusal_of(reading):
    try:
        reading()
    except DataError as error:
        return str(error)
    return None
