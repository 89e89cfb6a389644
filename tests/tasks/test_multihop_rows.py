"""The synthetic set beside what else klinic has: the tiny model's characters, and files of rows."""

import json

import pytest

from klinic.tasks.multihop.synthetic import SKILLS, format_prompt, jsonl_rows, make_example

pytest.importorskip("torch")


def test_the_tiny_tokenizer_knows_every_character():
    from klinic.model.tiny import CHARACTERS

    for hops in SKILLS.values():
        for number in range(200):
            assert set(format_prompt(make_example(hops, number))) <= set(CHARACTERS)


def test_the_set_written_as_a_file_is_read_as_musique_is(tmp_path):
    from klinic.data.dataset import read_rows

    path = tmp_path / "two-hop.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in jsonl_rows("two-hop", 5)))
    rows = read_rows(str(path), map_with="klinic.tasks.multihop.musique:row")
    assert len(rows) == 5
    assert rows[0]["answers"][1] == f"the {rows[0]['answers'][0]}"
