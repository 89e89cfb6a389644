"""run.json and tokens.json."""

import pytest

from klinic.errors import EvidenceError
from klinic.evidence.run_facts import read_run_facts, read_tokens, write_run_facts, write_tokens


def test_run_facts_come_back_with_their_schema(tmp_path):
    write_run_facts(tmp_path / "run", {"seed": 3, "sampling": {"temperature": 1.0}})
    expected = {"schema": 2, "seed": 3, "sampling": {"temperature": 1.0}}
    assert read_run_facts(tmp_path / "run") == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"schema": 3}', "has schema 3, but this klinic reads up to 2.*Update klinic"),
        ('{"seed": 1}', "`schema` is None"),
        ('{"schema": "1"}', "`schema` is '1'"),
        ('{"schema": 0}', "`schema` is 0"),
        ("{", "is not JSON"),
    ],
)
def test_a_run_that_cannot_be_understood_is_refused(tmp_path, content, reason):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(EvidenceError, match=rf"run\.json: {reason}"):
        read_run_facts(tmp_path)


def test_tokens_come_back_under_their_ids(tmp_path):
    texts = {0: "é", 151_642: "\ud83d", 7: "</script>\x1b[31m"}
    write_tokens(tmp_path, texts)
    assert read_tokens(tmp_path) == texts


def test_a_run_without_tokens_has_none(tmp_path):
    assert read_tokens(tmp_path) == {}


@pytest.mark.parametrize("content", ['{"a": "b"}', '{"1": 2}'])
def test_tokens_that_are_not_texts_of_ids_are_refused(tmp_path, content):
    (tmp_path / "tokens.json").write_text(content)
    with pytest.raises(EvidenceError, match="must map token ids to texts"):
        read_tokens(tmp_path)
