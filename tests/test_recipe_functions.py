"""The functions beside the recipes: rows that become chats, and what answers are worth."""

import importlib.util
import json
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[1] / "recipes"


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, RECIPES / path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def turns(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_the_reading_rows_are_those_that_the_script_makes(tmp_path):
    module(Path("reading/rows.py")).main(tmp_path)
    for name in ("train", "held_out", "capitals"):
        kept = (RECIPES / "reading" / f"{name}.jsonl").read_text()
        assert (tmp_path / f"{name}.jsonl").read_text() == kept


def test_held_out_reading_rows_share_no_word_that_matters_with_training():
    def answers(name):
        lines = (RECIPES / "reading" / f"{name}.jsonl").read_text().splitlines()
        return {json.loads(line)["answer"] for line in lines}

    assert not answers("train") & answers("held_out")


def test_reading_rewards_tell_answers_apart():
    rewards = module(Path("reading/rewards.py"))
    said = turns("lawyer", "Igor is a lawyer.", "Igor is a pilot and a lawyer.", "a pilot")
    given = {"answer": ["lawyer"] * 4, "others": [["pilot", "dog"]] * 4}
    assert rewards.exact(said, **given) == [1, 0, 0, 0]
    assert rewards.right(said, **given) == [1, 1, 0, 0]
    assert rewards.mentions(said, **given) == [1, 1, 1, 0]
    assert rewards.f1(said, **given) == [1, 0.5, pytest.approx(1 / 3), 0]
