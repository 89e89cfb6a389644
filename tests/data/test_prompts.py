"""Rows are read, checked one by one, and dealt out as a function of the step."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from klinic.data.dataset import check_rows, read_rows, rows_from_python
from klinic.data.prompts import PromptDataset
from klinic.errors import ConfigError, DataError
from klinic.model.chat import PromptEncoder

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]


def prompts(per_step=3, seed=0, rows=ROWS):
    encode = PromptEncoder(Characters(), "a model of characters")
    return PromptDataset(rows, encode=encode, prompts_per_step=per_step, seed=seed)


class Characters:
    """A tokenizer whose ids are characters."""

    chat_template = None

    def encode(self, text):
        return [ord(c) for c in text]


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
        assert [dict(row) for row in read_rows(path)] == ROWS


def test_an_epoch_holds_every_row_at_most_once_and_epochs_differ():
    one = prompts()
    first = [p.index for step in (1, 2, 3) for p in one.batch_at(step)]
    second = [p.index for step in (4, 5, 6) for p in one.batch_at(step)]
    assert len(set(first)) == len(set(second)) == 9
    assert first != second
    assert [p.index for p in prompts().batch_at(2)] == first[3:6]
    assert [p.index for p in prompts(seed=1).batch_at(1)] != first[:3]


def test_a_prompt_carries_ids_and_the_other_columns():
    prompt = prompts().prompt_at(4)
    assert (prompt.index, prompt.text, dict(prompt.columns)) == (4, "4+1=", {"answer": "5"})
    assert np.array_equal(prompt.token_ids, [ord(c) for c in "4+1="])


def test_more_prompts_than_rows_are_refused():
    with pytest.raises(ConfigError, match="a step would repeat a prompt"):
        prompts(per_step=11)


def test_the_digest_is_that_of_the_rows():
    assert prompts().digest == prompts(per_step=2, seed=5).digest
    assert prompts().digest != prompts(rows=ROWS[:9]).digest


@pytest.mark.parametrize(
    ("suffix", "data", "says"),
    [
        (".jsonl", b'{"promt": "a"}', "row 1 has no `prompt`.*Rename 'promt' to it"),
        (".jsonl", b'{"prompt": "a"}\n{"prompt": 5}', "row 2: `prompt` is 5"),
        (".jsonl", b'{"prompt": ""}', "at least one character"),
        (".jsonl", b'{"prompt": [{"role": "user"}]}', "message 1 of `prompt` has the content None"),
        (".jsonl", b'{"prompt": []}', "a chat without messages"),
        (".jsonl", b'{"prompt": ["hello"]}', "message 1 of `prompt` is 'hello'"),
        (".jsonl", b'{"prompt": [{"role": "user", "content": [1]}]}', "It must be text"),
        (
            ".jsonl",
            b'{"prompt": [{"role": "assistant", "content": "yes"}]}',
            "the last message of `prompt` is the assistant's",
        ),
        (".jsonl", b'{"messages": []}', "With data.map, return the messages before the last"),
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
        read_rows(written(tmp_path, suffix, data))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_rows(str(tmp_path / "none.jsonl"))


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300)
@given(JSON | st.dictionaries(st.sampled_from(["prompt", "promt", "x"]), JSON))
def test_any_row_is_used_or_refused_with_a_reason(row):
    good = isinstance(row, dict) and isinstance(row.get("prompt"), str) and row["prompt"] != ""
    good = good or (isinstance(row, dict) and _is_chat(row.get("prompt")))
    refusal = refusal_of(lambda: check_rows([(1, row)], "rows.jsonl"))
    if refusal is None:
        assert good
    else:
        assert "row 1" in refusal
        assert not good or "Unicode" in refusal


@settings(max_examples=200)
@given(st.binary(max_size=60), st.sampled_from([".jsonl", ".json", ".csv", ".parquet"]))
def test_any_bytes_are_used_or_refused_with_a_reason(tmp_path_factory, data, suffix):
    path = written(tmp_path_factory.getbasetemp(), suffix, data)
    refusal = refusal_of(lambda: read_rows(path))
    assert refusal is None or path in refusal


def refusal_of(reading):
    try:
        reading()
    except DataError as error:
        return str(error)
    return None


def _is_chat(prompt):
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in prompt)
    )


def test_a_user_function_makes_rows_and_leaves_some_out(tmp_path):
    rows = written(tmp_path, ".jsonl", b'{"question": "a"}\n{"question": ""}\n{"question": "b"}')
    (tmp_path / "mine.py").write_text(
        "def row(row):\n    return {'prompt': row['question']} if row['question'] else None\n"
    )
    function = f"{tmp_path / 'mine.py'}:row"
    assert [row["prompt"] for row in read_rows(rows, map_with=function)] == ["a", "b"]
    (tmp_path / "bad.py").write_text("def row(row):\n    return row['answer']\n")
    with pytest.raises(DataError, match=r"row 1: data.map failed on \{'question': 'a'\}: KeyError"):
        read_rows(rows, map_with=f"{tmp_path / 'bad.py'}:row")


def test_a_folder_has_configurations_and_splits(tmp_path):
    folder = tmp_path / "mine"
    (folder / "answerable").mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "answerable" / "train.jsonl").write_text(lines)
    (folder / "answerable" / "test.jsonl").write_text(lines)
    rows = read_rows(f"{folder},answerable,train[:3]")
    assert [row["prompt"] for row in rows] == ["0+1=", "1+1=", "2+1="]
    assert len(read_rows(f"{folder / 'answerable'},,test")) == 10
    with pytest.raises(DataError, match="with configuration answerable and split validation"):
        read_rows(f"{folder},answerable,validation")
    with pytest.raises(DataError, match="there is no folder"):
        read_rows(str(tmp_path / "none"))


def test_a_dataset_that_was_saved_is_read(tmp_path):
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "saved"))
    assert [r["answer"] for r in read_rows(f"{tmp_path / 'saved'},,train[2:4]")] == ["3", "4"]
    assert len(read_rows(f"{tmp_path / 'saved'},,train[50%:]")) == 5


def test_a_folder_that_cannot_be_read_is_refused(tmp_path):
    script = tmp_path / "mine"
    script.mkdir()
    (script / "mine.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_info.json").write_text("{")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.parquet").write_bytes(b"PAR1 no")
    for name in ("mine", "empty", "saved", "broken"):
        with pytest.raises(DataError, match=f"no dataset named .*{name} with configuration"):
            read_rows(str(tmp_path / name))


def test_a_saved_row_that_python_cannot_hold_is_refused(tmp_path):
    from datasets import Dataset

    when = pa.array([0, 2**62]).cast(pa.timestamp("us"))
    Dataset(pa.table({"prompt": ["a", "b"], "when": when})).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="saved"):
        read_rows(str(tmp_path / "saved"))


def test_rows_of_other_libraries_are_read_or_refused():
    import pandas as pd
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list(ROWS)
    assert rows_from_python(rows, "train_dataset") == ROWS
    for wrong in (pd.DataFrame(ROWS), DatasetDict({"train": rows})):
        with pytest.raises(DataError, match=r"train_dataset is a Data\w+, not rows"):
            rows_from_python(wrong, "train_dataset")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (10**5000, "row 2: `answer` is a int that cannot be shown"),
        ({("a", "b"): 1}, "row 2: `answer` is .* cannot be written as JSON"),
        ({1: 2, "a": 3}, "row 2: `answer` is .* cannot be written as JSON"),
    ],
    ids=["a long number", "a pair as key", "mixed keys"],
)
def test_a_value_without_a_digest_is_refused(value, says):
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": value}]
    with pytest.raises(DataError, match=says):
        _ = prompts(per_step=1, rows=rows).digest


class WholeBatches(Characters):
    """A tokenizer that counts how often it is called."""

    num_calls = 0

    def __call__(self, texts):
        self.num_calls += 1
        return {"input_ids": [self.encode(text) for text in texts]}


def test_long_prompts_are_found_without_a_call_for_each_row():
    rows = [{"prompt": "1+1="}] * 2_500 + [{"prompt": "a long prompt"}]
    tokenizer = WholeBatches()
    encode = PromptEncoder(tokenizer, "a model of characters")
    dealt = PromptDataset(rows, encode=encode, prompts_per_step=1, seed=0)
    dealt.refuse_long_prompts(window=14, max_new_tokens=1)
    assert tokenizer.num_calls == 3
    with pytest.raises(DataError, match=r"row 2501: .* come to 14 tokens, and the model takes 13"):
        dealt.refuse_long_prompts(window=13, max_new_tokens=1)


def test_an_empty_prompt_among_texts_has_its_row():
    encode = PromptEncoder(WholeBatches(), "a model of characters")
    dealt = PromptDataset([*ROWS, {"prompt": ""}], encode=encode, prompts_per_step=1, seed=0)
    with pytest.raises(DataError, match="row 11: `prompt` is '', which has no tokens"):
        dealt.refuse_long_prompts(window=13, max_new_tokens=1)
